"""The training loop as a script writes it: hooks, the step, what it looks at, what it does between steps."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.grammar import STEPS, Batch, Trial
from tests.fuzz.loss_source import is_of_rows, look, loss_function


def arguments_of(trial: Trial) -> list[str]:
    """The model's arguments besides ids and mask."""
    named = {
        "bias": trial.keys == "mask from the caller",
        "lengths": trial.keys == "lengths",
        "places": trial.positions == "given",
        "source": trial.second_side != "none",
        "source_mask": trial.second_side != "none",
        "labels": trial.place == "inside",
        "taught": trial.loss == "teacher" and trial.place == "inside",
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
        "forward hook on a block": "model.blocks[0].register_forward_hook(lambda module, given, out: out * 1.5)",
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
    }[trial.hooks]
    return f"""def make():
    model = Model().to(DTYPE).train()
{indent(chr(10).join(filter(None, (frozen, hooks))), " " * 4)}
    return model

"""


def _compute(trial: Trial) -> str:
    """`compute(called, batch, labels, taught)`, which returns the loss and the logits."""
    names = ["input_ids", "attention_mask", *arguments_of(trial)]
    given = ", ".join(f"{name!r}: {'taught' if name == 'taught' else f'batch[{name!r}]'}" for name in names)
    called = f"called({{{given}}})" if trial.wrapped != "no" else f"called(**{{{given}}})"
    if trial.wrapped == "no" and trial.returns == "tuple":
        called = "called(" + ", ".join("taught" if name == "taught" else f"batch[{name!r}]" for name in names) + ")"
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
    """`look_before` and `look_after` the backward, by case."""
    before = [look(trial, case.look)[0] for case in trial.cases]
    after = [look(trial, case.look)[1] for case in trial.cases]
    parts = []
    for name, lines, returned in (("look_before", before, "return loss"), ("look_after", after, "")):
        text = "\n".join(f"if case == {number}:\n    {line}" for number, line in enumerate(lines) if line)
        given = "case, loss, logits, labels, real, kept, note" if name == "look_before" else "case, logits, real, note"
        parts.append(f"def {name}({given}):\n{indent(text, '    ')}\n    {returned or 'return None'}\n")
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


def _outermost(trial: Trial) -> str:
    return "Wrapped(model)" if trial.wrapped != "no" else "model"


def _train(trial: Trial) -> str:
    compiled = {
        "backend": "called = torch.compile(called, backend='deepytorch', options=OPTIONS)",
        "import": "deepytorch.configure(options=OPTIONS)",
        "compiled in place": "called.compile(backend='deepytorch', options=OPTIONS)",
        "function": "computed = torch.compile(compute, backend='deepytorch', options=OPTIONS)",
    }[trial.host]
    lines = [
        "model = make()",
        "prepare(model)",
        "trained = [each for each in model.parameters() if each.requires_grad]",
        f"called, computed = {_outermost(trial)}, compute",
        f"if side == 'deepytorch':\n    {compiled}",
        *(["teacher = Model().to(DTYPE).eval().requires_grad_(False)"] if trial.loss == "teacher" else []),
        f"optimizer = {OPTIMIZERS[trial.optimizer]}",
        "start = copy.deepcopy(model.state_dict())",
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
            "torch.manual_seed(seed)",
            "kept = []",
            f"for step in range({STEPS}):",
            f"    for part in range({trial.accumulate}):",
            "        shape = (rows + step % 2 * varies, positions + step * varies)",
            "        batch = make_batch(*shape, padding, labels, 10 * seed + 2 * step + part)",
            "        given = {name: each.clone() for name, each in batch.items()}",
            indent(_one_part(trial), "        "),
            '        note("loss", loss)',
            "        for name, each in batch.items():",
            "            note(f'batch: {name}', each)",
            "            assert torch.equal(each, given[name]), f'{name} was written to'",
            indent(_after_step(trial), "    "),
            "for logits, real in kept:",
            '    note("kept logits at tokens", logits[real])',
            "for name, each in model.state_dict().items():",
            "    note(f'weight: {name}', each)",
            'note("the next draw", torch.rand(3))',
        ]
    )


def _one_part(trial: Trial) -> str:
    """From the batch to its backward."""
    taught = ", taught" if trial.loss == "teacher" else ""
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
    lines.append(f"loss, logits = computed(called, batch{taught})")
    lines.append("real = batch['attention_mask'].bool()")
    if trial.calls != "1":
        turn = "each.flip(1) if each.dim() == 2 else each" if "turned" in trial.calls else "each.flip(0)"
        lines.append(f"other = {{name: {turn} for name, each in batch.items()}}")
        lines.append(f"loss = loss + computed(called, other{taught})[0]")
    lines.append("loss = look_before(case, loss, logits, batch['labels'], real, kept, note)")
    if trial.random == "drawn by the loop":
        lines.append("loss = loss * (1 + torch.rand(()))")
    lines.append(f"(loss / {trial.accumulate}).backward()" if trial.accumulate != "1" else "loss.backward()")
    lines.append("look_after(case, logits, real, note)")
    return "\n".join(lines)


def _after_step(trial: Trial) -> str:
    taught = ", taught" if trial.loss == "teacher" else ""
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
                "for name, each in model.named_parameters():\n    note(f'gradient: {name}', each.grad)",
                CLIPS[trial.clip],
                "optimizer.step()",
                f"optimizer.zero_grad({zeroed})",
                between,
            ],
        )
    )
