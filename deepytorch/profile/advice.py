"""Advice: what follows from the figures of a profile. Each rule is one line of `RULES`, with its threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepytorch.profile.records import COMMUNICATION, COMPILE, COMPUTE, HOST, LOADER, OPTIMIZER, REST, Part
from deepytorch.profile.summary import EXPOSED, SLOWER, Profile, beginning, in_eager, reasons

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # optimizers of torch that take `fused=True`


@dataclass(frozen=True)
class Rule:
    """One rule.

    above: the share from which on the advice is given. share: of a step's time, or of what is said. say: the advice.
    """

    about: str
    above: float
    share: Callable[[Profile], float]
    say: Callable[[Profile], str]


@dataclass(frozen=True)
class Advice:
    """One piece of advice. share: the share that led to it."""

    about: str
    share: float
    text: str


def advise(profile: Profile) -> list[Advice]:
    """Return the advice that a profile gives, the largest share first."""
    shares = [(rule, rule.share(profile)) for rule in RULES]
    found = [Advice(rule.about, share, rule.say(profile)) for rule, share in shares if share > rule.above]
    return sorted(found, key=lambda each: -each.share)


def _padding(profile: Profile) -> float:
    return (profile.padding or (0.0, 0.0))[1]


def _why_padded(profile: Profile) -> str:
    padded = sum(seconds for part, seconds in profile.parts.items() if part.group == COMPUTE and part.form != "packed")
    told = [
        f"{each['name']} ({each['outcome']}): {'; '.join(why)}." for each in profile.regions() if (why := reasons(each))
    ]
    return (
        f"{_padding(profile):.0%} of all positions are padding and were computed, which takes about "
        f"{1e3 * padded * _padding(profile):.1f} ms a step. {' '.join(told) or 'The report gives no reason.'} "
        "deepytorch.explain(model, **batch) says more; rows of similar lengths in a batch help in any case."
    )


def _in_eager(profile: Profile) -> str:
    told = []
    for region in profile.regions():
        if any("eager" in form or "until" in form for form in region["forms"]):
            why = reasons(region)
            told.append(f"{region['name']}: {why[0] if why else 'no reason is known'}.")
    told = told or ["No region of it is known to deepytorch."]
    return f"{in_eager(profile):.0%} of a step runs operator by operator. {' '.join(told)}" + _TRACE_SHOWS


def _loader(profile: Profile) -> str:
    workers = max((rank.workers or 0 for rank in profile.ranks), default=0)
    if not workers:
        return "Training waits for batches, which this process makes itself: give the DataLoader num_workers=2 or more."
    return (
        f"Training waits for batches although {workers} processes make them: more num_workers, persistent_workers=True "
        "if it is the start of an epoch, or less work a row (tokenize once, ahead)."
    )


def _exposed(profile: Profile) -> str:
    report = profile.ranks[0].report
    stock = [group["why"] for group in report.get("groups_on_stock", [])]
    late = [str(entry["from_eager_frames"]) for entry in report.get("gradients", []) if entry["from_eager_frames"]]
    told = ["Training stands still for transfers that nothing hides."]
    if stock:
        told.append(f"A process group runs on stock gloo or nccl: {stock[0]}.")
    if late:
        told.append(f"{late[0]} gradients came from parts in eager, so that buckets left late.")
    told.append(
        "deepytorch.comm.send_bf16(model) halves the bytes, Options(compress='bf16') of the group those between hosts; "
        "no_sync() and more micro-batches send less often. Without bucket_cap_mb, bucket sizes follow from the network."
    )
    return " ".join(told)


def _slower(profile: Profile) -> str:
    place = profile.slowest
    own, others = profile.means[place], [means for at, means in enumerate(profile.means) if at != place]

    def excess(part: Part) -> float:
        return own[part] - sum(means.get(part, 0.0) for means in others) / len(others)

    worst = max((part for part in own if part not in (EXPOSED, SLOWER)), key=excess)
    most_ms = 1e3 * max(means.get(SLOWER, 0.0) for means in profile.means)
    return (
        f"Ranks wait for rank {profile.ranks[place].rank}, up to {most_ms:.1f} ms a step. What takes longer there: "
        f"{worst.label}, by {1e3 * excess(worst):.1f} ms. If batches are uneven, give each rank as many tokens."
    )


def _host(profile: Profile) -> str:
    largest = max((part for part in profile.parts if part.group == HOST), key=lambda part: profile.parts[part])
    return (
        f"The host works while nothing is computed, mostly in: {largest.what}. A larger batch makes it a smaller share."
    )


def _optimizer(profile: Profile) -> str:
    rank = profile.ranks[0]
    if rank.optimizer in _FUSED and not rank.fused and rank.device == "cuda":
        return f"{rank.optimizer} runs unfused: give it fused=True."
    return "Its time does not depend on the batch: a larger batch, or accumulated gradients, makes it a smaller share."


def _compiling_late(profile: Profile) -> float:
    """Return the share of steps after the tenth that were traced, compiled or tried something."""
    late = [step for step in profile.ranks[0].steps if step.number > 10]
    return sum(not step.settled for step in late) / len(late) if late else 0.0


def _still_compiling(profile: Profile) -> str:
    steps, seconds, compiling = beginning(profile.ranks[0])
    return (
        f"Steps are still traced or compiled after the tenth: {steps} steps in all, {seconds:.0f} s, {compiling:.0f} s "
        "of it for compiling. Sizes or flags that vary from step to step make it; TORCH_LOGS=recompiles names them."
    )


_TRACE_SHOWS = " trace.json shows which operators."
_OF_THE_SCRIPT = (
    "Time goes to the script outside of model, backward, optimizer and DataLoader: a loader of its own, a loss outside "
    "of the model, .item(), logs." + _TRACE_SHOWS
)
_FIRST_STEPS = "No step was settled: these are the first ones, which trace and compile. Let the script run longer."
RULES = (
    Rule("padding left", 0.10, _padding, _why_padded),
    Rule("in eager", 0.20, in_eager, _in_eager),
    Rule("data loader", 0.05, lambda profile: profile.share(LOADER), _loader),
    Rule("exposed communication", 0.05, lambda profile: profile.share(COMMUNICATION, EXPOSED.what), _exposed),
    Rule("slower ranks", 0.05, lambda profile: profile.share(COMMUNICATION, SLOWER.what), _slower),
    Rule("host", 0.05, lambda profile: profile.share(HOST), _host),
    Rule("optimizer", 0.15, lambda profile: profile.share(OPTIMIZER), _optimizer),
    Rule("the script", 0.15, lambda profile: profile.share(REST), lambda _: _OF_THE_SCRIPT),
    Rule("still compiling", 0.05, _compiling_late, _still_compiling),
    Rule("compiling", 0.05, lambda profile: profile.share(COMPILE), lambda _: _FIRST_STEPS),
)
