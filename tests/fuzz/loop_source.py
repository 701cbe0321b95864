"""The training loop as a script writes it: hooks, the step, what it looks at, what it does between steps."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.grammar import STEPS, Batch, Trial
from tests.fuzz.look_source import look
from tests.fuzz.loss_source import TAUGHT, is_of_rows, loss_function
from tests.fuzz.random_source import HELPERS, before_the_call, behind_the_backward, behind_the_call


def arguments_of(trial: Trial) -> list[str]:
    """The model's arguments besides ids and mask."""
    named = {
        "bias": trial.keys == "mask from the caller",
        "lengths": trial.keys == "lengths",
        "places": trial.positions == "given",
        "source": trial.second_side != "none",
        "source_mask": trial.second_side != "none",
        "labels": trial.place == "inside",
        "prefix": trial.reach == "prefix of each row",
        "documents": trial.reach == "documents",
        "taught": trial.loss in TAUGHT and trial.place == "inside",
    }
    return [name for name, is_given in named.items() if is_given]


def imports_deepytorch(trial: Trial) -> bool:
    """Return whether the script has the import, and not the backend's name alone."""
    return trial.host in ("import", "compiled in place")


def loop(trial: Trial) -> str:
    """Return the cases, and the function `run`, which trains on all of them, with those that it calls."""
    cases = "".join(f"    {_case(case)},\n" for case in trial.cases)
    side = "contextlib.nullcontext()"
    if imports_deepytorch(trial):
        side = f"deepytorch.paused() if side == 'eager' else {side}"
    return f'''# rows, positions, how they change, padding, labels, seed
CASES = [
{cases}]


{_make(trial)}

{_compute(trial)}

{_looks(trial)}
{HELPERS if trial.draws else ""}

def run(side, prepare=lambda model: None):
    """Train on all cases; returns (case, name, tensor or None) of all that a script may look at."""
    torch.manual_seed({trial.index})
    notes = []
    with {side}:
        train(side, prepare, notes)
    return notes


{_train(trial)}
'''


def _case(case: Batch) -> tuple[object, ...]:
    return (case.rows, case.positions, int(case.varies), case.padding, case.labels, case.seed)


def _make(trial: Trial) -> str:
    frozen = {
        "nothing": "",
        "the embedding": "model.tokens.requires_grad_(False)",
        "all but the head": "model.requires_grad_(False)\nmodel.head.requires_grad_()",
        "the head": "model.head.requires_grad_(False)",
        "norms": (
            "for each in model.modules():\n    if 'Norm' in type(each).__name__:\n        each.requires_grad_(False)"
        ),
    }[trial.frozen]
    hooks = {
        "none": "",
        "forward hook on a block": BLOCK_HOOK,
        "hook on a gradient": "model.head.weight.register_hook(lambda grad: grad * 2)"
        if trial.frozen != "the head"
        else "",
        "pre-hook on the model": "model.register_forward_pre_hook(lambda module, given: None)",
        "backward hook on a block": "model.blocks[0].register_full_backward_hook(lambda module, given, out: None)",
        "gradient of the embedding": (
            "model.tokens.register_forward_hook(lambda module, given, out: out.requires_grad_(torch.is_grad_enabled()))"
            if trial.frozen in ("the embedding", "all but the head")
            else "model.tokens.register_forward_hook(lambda module, given, out: out)"
        ),
    }.get(trial.hooks, "")
    return f"""def make():
    model = Model().to(DTYPE).train()
{indent(chr(10).join(filter(None, (frozen, hooks))), " " * 4)}
    return model

"""


BLOCK_HOOK = "model.blocks[0].register_forward_hook(lambda module, given, out: out + out.sin())"
MIDWAY = {
    "midway: forward hook on a block": BLOCK_HOOK,
    "midway: hook on a gradient": "trained[-1].register_hook(lambda grad: grad * 2)",
    "midway: pre-hook on the model": "model.register_forward_pre_hook(lambda module, given: None)",
    "midway: forward hook on the model": "model.register_forward_hook(lambda module, given, out: None)",
}


def _compute(trial: Trial) -> str:
    """`compute(called, batch, labels, taught)`, which returns the loss and the logits."""
    names = ["input_ids", "attention_mask", *arguments_of(trial)]
    given = ", ".join(f"{name!r}: {'taught' if name == 'taught' else f'batch[{name!r}]'}" for name in names)
    called = f"called({{{given}}})" if _takes_a_batch(trial) else f"called(**{{{given}}})"
    if not _takes_a_batch(trial) and trial.returns == "tuple":
        called = "called(" + ", ".join("taught" if name == "taught" else f"batch[{name!r}]" for name in names) + ")"
    if trial.checkpoints == "around the model":
        called = called.replace("called(", "checkpoint(called, ", 1)[:-1] + ", use_reentrant=False)"
    order = (["loss"] if trial.place == "inside" else []) + ["logits"] + (["x"] if "hidden" in trial.place else [])
    lines = [f"out = {called}"]
    for place, name in enumerate(order):
        taken = {"tuple": f"out[{place}]", "dict": f"out[{name!r}]", "dataclass": f"out.{name}"}[trial.returns]
        lines.append(f"{name} = {taken}")
    if trial.place != "inside":
        if "x" not in order and trial.loss == "squares of hidden":
            lines.append("x = logits")
        lines.append("labels, attention_mask = batch['labels'], batch['attention_mask']")
        lines.append(loss_function(trial))
        if "hidden" in trial.place and not is_of_rows(trial):
            lines.append("loss = loss + 0.01 * (x.pow(2).sum(-1) * attention_mask).sum() / attention_mask.sum()")
    lines.append("return loss, logits")
    text = "\n".join(lines)
    if trial.dtype == "autocast":
        text = "with torch.autocast('cpu', dtype=torch.bfloat16):\n" + indent(text, "    ")
    return f"""def compute(called, batch, taught=None):
{indent(text, " " * 4)}

"""


def _looks(trial: Trial) -> str:
    """`look_before` and `look_after` the backward, and `look_late`, after the optimizer's step, by case."""
    parts = []
    for place, name in enumerate(("look_before", "look_after", "look_late")):
        lines = [look(trial, case.look)[place] for case in trial.cases]
        text = "\n".join(f"if case == {number}:\n    {line}" for number, line in enumerate(lines) if line)
        given = "case, loss, logits, labels, real, kept, note" if name == "look_before" else "case, logits, real, note"
        returned = "return loss" if name == "look_before" else "return None"
        parts.append(f"def {name}({given}):\n{indent(text, '    ')}\n    {returned}\n")
    return "\n\n".join(parts)


OPTIMIZERS = {
    "sgd": "torch.optim.SGD(trained, lr=0.05)",
    "momentum": "torch.optim.SGD(trained, lr=0.05, momentum=0.9)",
    "adamw": "torch.optim.AdamW(trained, lr=0.01, eps=1e-3)",
}
CLIPS = {
    "no": "",
    "norm": 'note("norm", torch.nn.utils.clip_grad_norm_(trained, 0.5))',
    "value": "torch.nn.utils.clip_grad_value_(trained, 0.1)",
}


def _takes_a_batch(trial: Trial) -> bool:
    return trial.wrapped.startswith("module")


def _outermost(trial: Trial) -> str:
    if trial.wrapped == "DDP":
        return "nn.parallel.DistributedDataParallel(model)"
    return "Wrapped(model)" if _takes_a_batch(trial) else "model"


_PROCESS_GROUP = [
    "if not torch.distributed.is_initialized():",
    "    store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)",
    "    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)",
]


def _train(trial: Trial) -> str:
    compiled = {
        "backend": "called = torch.compile(called, backend='deepytorch', options=OPTIONS)",
        "import": "deepytorch.configure(options=OPTIONS)",
        "compiled in place": "called.compile(backend='deepytorch', options=OPTIONS)",
        "function": "computed = torch.compile(compute, backend='deepytorch', options=OPTIONS)",
    }[trial.host]
    lines = [
        *(_PROCESS_GROUP if trial.wrapped == "DDP" else []),
        "model = make()",
        "prepare(model)",
        "trained = [each for each in model.parameters() if each.requires_grad]",
        f"called, computed = {_outermost(trial)}, compute",
        f"if side == 'deepytorch':\n    {compiled}",
        *(["teacher = Model().to(DTYPE).eval().requires_grad_(False)"] if trial.loss in TAUGHT else []),
        f"optimizer = {OPTIMIZERS[trial.optimizer]}",
        "start, at_rest = copy.deepcopy(model.state_dict()), optimizer.state_dict()",
        "for case, (rows, positions, varies, padding, labels, seed) in enumerate(CASES):",
        indent(_train_case(trial), "    "),
    ]
    return f"def train(side, prepare, notes):\n{indent(chr(10).join(lines), '    ')}\n"


def _train_case(trial: Trial) -> str:
    return "\n".join(
        [
            "def note(name, value):",
            "    if value is not None:",
            "        value = torch.tensor(value.detach().double().numpy(), dtype=value.dtype)  # looked at now",
            "    notes.append((case, f'step {step}: {name}', value))",
            "",
            "model.load_state_dict(start)",
            "optimizer.load_state_dict(at_rest)  # numbers that are not finite would stay in it for all cases",
            "torch.manual_seed(seed)",
            "kept = []",
            f"for step in range({STEPS}):",
            f"    for part in range({trial.accumulate}):",
            "        shape = (rows + step % 2 * varies, positions + step * varies)",
            "        batch = make_batch(*shape, padding, labels, 10 * seed + 2 * step + part)",
            "        given = {name: each.clone() for name, each in batch.items()}",
            indent(_one_part(trial), "        "),
            *([] if trial.draws else ['        note("loss", loss)']),
            "        for name, each in batch.items():",
            "            note(f'batch: {name}', each)",
            "            assert torch.equal(each, given[name]), f'{name} was written to'",
            indent(_after_step(trial), "    "),
            *(["if case % 8 == 1:\n    hook.remove()"] if trial.hooks in MIDWAY else []),
            "for logits, real in kept:",
            '    note("kept logits at tokens", logits[real])',
            *([] if trial.draws else _AT_THE_END),
        ]
    )


_AT_THE_END = [
    "for name, each in model.state_dict().items():",
    "    note(f'weight: {name}', each)",
    'note("the next draw", torch.rand(3))',
]


def _one_part(trial: Trial) -> str:
    """From the batch to its backward."""
    taught = ", taught" if trial.loss in TAUGHT else ""
    lines = []
    if taught:
        given = ["input_ids", "attention_mask", *arguments_of(trial)]
        names = ", ".join(
            f"{name}="
            + (
                "0 * batch['input_ids'][..., None] + torch.zeros(VOCAB, dtype=DTYPE)"
                if name == "taught"
                else f"batch['{name}']"
            )
            for name in given
        )
        take = {"tuple": "[-2]" if "hidden" in trial.place else "[-1]", "dict": "['logits']", "dataclass": ".logits"}[
            trial.returns
        ]
        lines.append(f"with torch.no_grad():\n    taught = teacher({names}){take}")
    if trial.hooks in MIDWAY:
        lines.append(f"if case % 8 == 1 and step == 1 and part == 0:\n    hook = {MIDWAY[trial.hooks]}")
    call = f"computed(called, batch{taught})"
    if trial.draws:
        lines.append(before_the_call(trial, call))
    lines.append(f"loss, logits = {call}")
    lines.append("real = batch['attention_mask'].bool()")
    if trial.draws:
        lines.append(behind_the_call(trial))
    if trial.calls != "1":
        turn = "each.flip(1) if each.dim() == 2 else each" if "turned" in trial.calls else "each.flip(0)"
        lines.append(f"other = {{name: {turn} for name, each in batch.items()}}")
        lines.append(f"loss = loss + computed(called, other{taught})[0]")
    lines.append("loss = look_before(case, loss, logits, batch['labels'], real, kept, note)")
    if trial.random == "drawn by the loop":
        lines.append("loss = loss * (1 + torch.rand(()))")
    lines.append(f"(loss / {trial.accumulate}).backward()" if trial.accumulate != "1" else "loss.backward()")
    lines.append("look_after(case, logits, real, note)")
    if trial.draws:
        lines.append(behind_the_backward(trial, call))
    return "\n".join(lines)


_GRADIENTS = "for name, each in model.named_parameters():\n    note(f'gradient: {name}', each.grad)"


def _after_step(trial: Trial) -> str:
    taught = ", taught" if trial.loss in TAUGHT else ""
    between = {
        "evaluation": (
            "called.eval()\nwith torch.no_grad():\n"
            f"    loss, logits = computed(called, batch{taught})\n"
            '    note("evaluation: loss", loss)\n    note("evaluation: logits", logits'
            + ("" if is_of_rows(trial) else "[real]")
            + ")\ncalled.train()"
        ),
        "copied": (
            f"with torch.no_grad():\n    twin = copy.deepcopy({_outermost(trial)})\n"
            f"    note('a copy: loss', compute(twin, batch{taught})[0])"
        ),
        "saved": (
            "file = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)\n"
            "model.load_state_dict(torch.load(file))"
        ),
    }.get(trial.between, "")
    zeroed = "set_to_none=False" if "zeroed" in trial.between else ""
    return "\n".join(
        filter(
            None,
            [
                "" if trial.draws else _GRADIENTS,
                CLIPS["no" if trial.draws else trial.clip],
                "optimizer.step()",
                f"optimizer.zero_grad({zeroed})",
                "look_late(case, logits, real, note)",
                "model.load_state_dict(start)" if trial.draws else "",
                between,
            ],
        )
    )
