"""Random numbers that a model draws, and what a script can ask of them.

Packed, a model draws other numbers than padded, from one distribution. So losses and gradients are not compared with
eager's. What is promised is: two calls with the generator set back draw alike; gradients are those of the loss with
these draws; numbers that look at pads are of eager's draws; evaluation draws nothing; and the distribution.
"""

from __future__ import annotations

from tests.fuzz.grammar import STEPS, Trial

DROPPED = 0.5
HELPERS = '''
def nudge(trained, ways, size):
    with torch.no_grad():
        for weight, way in zip(trained, ways):
            weight.add_(way, alpha=size)


def slopes(trained, loss_again, size=1e-6):
    """Slopes of the loss along random ways, each call with the same draws."""
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        ways = [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in trained]
        ends = []
        for end in (size, -size):
            nudge(trained, ways, end)
            ends.append(loss_again().detach())
            nudge(trained, ways, -end)
        found.append(((ends[0] - ends[1]) / (2 * size), ways))
    return found


def has_one_of(trained, found):
    """Whether gradients say one of the slopes; the other may cross a kink of the loss."""
    for slope, ways in found:
        given = sum((way * weight.grad).sum() for way, weight in zip(ways, trained) if weight.grad is not None)
        if (slope - given).abs() < 1e-5 * (1 + slope.abs()):
            return torch.tensor(True)
    return torch.tensor(False)


def mean_over_draws(numbers):
    """The mean, and how far it may be off."""
    numbers = torch.stack(numbers).detach()
    return torch.stack([numbers.mean(), numbers.std() / len(numbers) ** 0.5])
'''


def block_dropout(trial: Trial) -> tuple[str, str]:
    """Return the line of a block's `__init__`, and what is called with what the block returns."""
    if trial.random == "dropout at 0":
        return "\n        self.drop = nn.Dropout(0.0)", "self.drop"
    if trial.random == "dropout":
        return f"\n        self.drop = nn.Dropout({DROPPED})", "self.drop"
    return "", ""


def noise_of_words(trial: Trial) -> str:
    """Return the line that changes the embedded words in training."""
    return {
        "dropout of words": f"x = F.dropout(x, {DROPPED}, self.training)",
        "dropout of rows": "if self.training:\n    x = x * (torch.rand(x.shape[0], 1, 1) < 0.5).to(x.dtype) * 2",
        "noise": "if self.training:\n    x = x + 0.3 * torch.randn_like(x)",
    }.get(trial.random, "")


def attention_dropout(trial: Trial) -> str:
    """Return the probability with which attention drops weights, as an expression; empty if it does not."""
    return f"{DROPPED} if self.training else 0.0" if trial.random == "dropout of attention" else ""


def sets_generators_back(trial: Trial) -> bool:
    """Return whether the script draws the same numbers again and again. With the import its model is eager's then."""
    return trial.host != "import"


def before_the_call(trial: Trial, call: str) -> str:
    """Return the lines that ask for slopes, and that set the generator for the call."""
    lines = ["model.load_state_dict(start)  # draws differ, and weights would"]
    if not sets_generators_back(trial):
        return "\n".join([*lines, "torch.manual_seed(seed + step)"])
    again = ["def again():", "    torch.manual_seed(seed + step)", f"    return {call}"]
    found = "found = slopes(trained, lambda: again()[0])"
    return "\n".join([*lines, *again, found, *lines, "first, _ = again()", "torch.manual_seed(seed + step)"])


def behind_the_call(trial: Trial) -> str:
    """Return the line that compares two calls with the same draws."""
    return 'note("two calls apart", loss - first)' if sets_generators_back(trial) else ""


def behind_the_backward(trial: Trial, call: str) -> str:
    """Return the lines that compare gradients with slopes, and the distribution of what is drawn."""
    lines = ['note("gradients say the slopes", has_one_of(trained, found))'] if sets_generators_back(trial) else []
    return "\n".join(
        [
            *lines,
            "for name, each in model.named_parameters():",
            "    note(f'{name} has a gradient', torch.tensor(each.grad is not None))",
            f"if case == 0 and step == {STEPS - 1}:",
            f"    torch.manual_seed(seed + {STEPS})",
            f"    drawn = [{call} for _ in range(60)]",
            "    where = real if logits.dim() == 3 else slice(None)",
            "    losses = [loss for loss, _ in drawn]",
            "    pairs = zip(drawn[::2], drawn[1::2])",
            "    apart = [(one[where] - two[where]).pow(2).mean() for (_, one), (_, two) in pairs]",
            '    note("loss over draws", mean_over_draws(losses))',
            '    note("logits apart over draws", mean_over_draws(apart))',
        ]
    )
