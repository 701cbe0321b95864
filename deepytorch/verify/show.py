"""The output of a verdict: what was compared, what differs first and where, and what was compiled."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deepytorch.bench.table import table_of
from deepytorch.verify.compare import COUNT, LOSS, NORM, SENSITIVITIES, TOTAL, WEIGHT, Compared
from deepytorch.verify.run import Verdict

_KINDS = {
    LOSS: "losses",
    TOTAL: "total gradient",
    NORM: "gradients",
    WEIGHT: "end weights",
    COUNT: "counts",
}


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict."""
    console.print(_summary(verdict))
    if verdict.differences:
        console.print(_differences(verdict))
    if verdict.with_import.report.get("regions"):
        console.print(_regions(verdict))
    for remark in remarks(verdict):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    console.print(_sentence(verdict), highlight=False, soft_wrap=True)


def remarks(verdict: Verdict) -> Iterator[str]:
    """Yield remarks that one needs to read the tables."""
    options, without = verdict.options, verdict.without
    if without.steps < options.steps:
        yield f"The script came to its end after {without.steps} of {options.steps} steps."
    if not options.dropout:
        yield f"--no-dropout: {without.dropouts} settings of dropout were set to zero in all runs."
    if without.draws:
        what = "in spite of --no-dropout" if not options.dropout else "in training (dropout, for one)"
        yield (
            f"The model draws random numbers {what}: {', '.join(without.draws)}. What is packed draws others than what "
            "is padded, of the same distribution, so numbers may differ where nothing is wrong."
            + (" Compare with --no-dropout, which sets dropout to zero in all runs." if options.dropout else "")
        )
    if not without.losses():
        yield "No scalar was handed to backward, so no losses were compared."
    if verdict.moved.failure is not None:
        yield (
            "Eager's own sensitivity is not known, because the run with moved weights failed: "
            f"{verdict.moved.failure.splitlines()[-1]} Differences were judged by --tolerance alone."
        )
    first = next((each for each in verdict.compared if each.kind == LOSS and each.sensitivity is not None), None)
    if first is not None and (first.sensitivity or 0.0) > options.tolerance:
        yield (
            f"Without the import, moving each weight by its last bit changes the first loss by {first.sensitivity:.1e}:"
            " the script draws numbers that no seed fixes, or computes in low precision. Differences of that size say "
            "nothing."
        )
    for run in (without, verdict.with_import):
        if run.weights_missing is not None:
            yield f"The weights at the end were not compared: {run.weights_missing}. (TMPDIR names another folder.)"
            break
    if verdict.with_import.failure is None and not verdict.num_packed:
        yield "Nothing ran packed: deepytorch left what was compared as it is, or compiled it as stock does."


def _summary(verdict: Verdict) -> Table:
    options = verdict.options
    title = f"{' '.join(options.command)}: {verdict.with_import.steps} steps, seed {options.seed}"
    rows = []
    for kind, told in _KINDS.items():
        of_kind = [each for each in verdict.compared if each.kind == kind]
        if not of_kind:
            continue
        worst = max(of_kind, key=lambda each: each.relative / each.allowed if each.allowed else each.relative)
        differ = sum(not each.agrees for each in of_kind)
        said = Text(f"{differ:,} differ", "bold red") if differ else Text("agree", "green")
        rows.append((told, f"{len(of_kind):,}", f"{worst.relative:.1e}", _own(worst), f"{worst.allowed:.1e}", said))
    columns = ("compared", "numbers", "difference", "eager's own", "allowed", "")
    return table_of(escape(title), columns, rows, left=("compared", ""))


def _differences(verdict: Verdict) -> Table:
    firsts: dict[str, Compared] = {}
    for each in verdict.differences:
        firsts.setdefault(each.kind, each)
    rows = [
        (
            each.where,
            _what(each),
            f"{each.without:.6g}",
            f"{each.with_import:.6g}",
            f"{each.relative:.1e}",
            _own(each),
        )
        for each in firsts.values()
    ]
    columns = ("where", "what", "without", "with import", "difference", "eager's own")
    return table_of("What differs first, of each kind", columns, rows, left=("where", "what"))


def _regions(verdict: Verdict) -> Table:
    rows = []
    for region in verdict.with_import.report["regions"]:
        reasons = [f"{count} x {reason}" for reason, count in region["padded_because"].items()]
        why = "\n".join([*reasons, *region["declined"], *region["fallbacks"]])
        steps = (str(region["steps_packed"]), str(region["steps_padded"]))
        rows.append((region["name"], region["outcome"], *steps, why))
    columns = ("region", "outcome", "steps packed", "padded", "why padded or declined")
    return table_of("What deepytorch compiled", columns, rows, left=("region", "outcome", "why padded or declined"))


def _sentence(verdict: Verdict) -> str:
    differences, failure = verdict.differences, verdict.with_import.failure
    lines = []
    if failure is not None:
        steps = verdict.with_import.steps
        lines.append(f"[bold red]Fails[/] with the import only, after {steps} of {verdict.without.steps} steps:")
        lines.append(escape(failure))
        if not failure.startswith("Traceback") and verdict.with_import.output:
            lines.append(f"Its last lines:\n{escape(verdict.with_import.output)}")
    if differences:
        first = differences[0]
        since = first.where if first.step is None else f"from {first.where} on"
        lines.append(
            f"[bold red]Differs[/] {since}: {escape(_what(first))} is {first.without:.7g} without the import and "
            f"{first.with_import:.7g} with it, {_relative(first)}. {escape(_where(verdict, first))}"
        )
    elif failure is None:
        lines.append(
            f"[bold green]Agrees[/]: every number is within {verdict.options.tolerance:g} (relative), or within "
            f"{SENSITIVITIES:g} times what rounding alone changes without the import."
        )
    return "\n".join(lines)


def _relative(each: Compared) -> str:
    own = "" if each.sensitivity is None else f"; eager's own sensitivity is {each.sensitivity:.1e}"
    return f"{each.relative:.1e} relative{own}, {each.allowed:.1e} is allowed"


def _where(verdict: Verdict, each: Compared) -> str:
    packed, padded = verdict.regions_in(each.step)
    when = "in the run" if each.step is None else "in that step"
    if packed:
        return f"Packed {when}: {', '.join(packed)}."
    if padded:
        return f"Nothing was packed {when}; padded: {', '.join(padded)}."
    return f"Nothing was packed {when}."


def _what(each: Compared) -> str:
    return {NORM: f"gradient of {each.name}", WEIGHT: f"weight {each.name}"}.get(each.kind, each.name)


def _own(each: Compared) -> str:
    return "not known" if each.sensitivity is None else f"{each.sensitivity:.1e}"
