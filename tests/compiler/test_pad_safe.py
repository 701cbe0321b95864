"""Every use in the table gives at tokens what eager gives, values and gradients, and never asks for a pad; whatever is
not pad-safe asks for the padded value and gives eager's numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.outputs import pad_safe
from deepytorch.compiler.step.outputs.deferred import defer, is_deferred
from deepytorch.compiler.step.outputs.pending import Family
from deepytorch.compiler.step.outputs.tokens import Place, Tokens
from deepytorch.compiler.step.route import State, Uses
from deepytorch.errors import DeferredError

ROWS, POSITIONS, FEATURES = 3, 5, 4
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)


class Asked(AssertionError):
    """The padded value was computed."""


class Case:
    """One padded value in eager, and an object of which the tokens alone are there."""

    def __init__(self, *, exact: bool, features: tuple[int, ...] = (FEATURES,), dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(ROWS, POSITIONS, *features, generator=generator).to(dtype)
        self.eager = values.clone().requires_grad_(dtype.is_floating_point)
        self.base = values.clone().requires_grad_(dtype.is_floating_point)
        self.asked = 0
        place = Place((ROWS, POSITIONS), MASK.flatten().nonzero().squeeze(1))
        self.events = RegionEvents(RegionRecord("region", "packed", "eager"), State(packs=True, defers=True))

        def compute() -> torch.Tensor:
            self.asked += 1
            if not exact:
                raise Asked
            return self.base * 1

        self.object = defer(
            values.shape,
            compute,
            dtype=dtype,
            device="cpu",
            requires_grad=dtype.is_floating_point,
            name="logits",
            tokens=lambda: Tokens.of(place, place.take(self.base)),
            events=self.events,
            family=Family(),
        )
        self.mask, self.wide = MASK, MASK[..., None]
        self.labels = torch.randint(FEATURES, (ROWS, POSITIONS), generator=generator).masked_fill(~MASK, -100)
        self.head = torch.randn(6, FEATURES, generator=generator)


def at_tokens(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return value[mask]


# Uses whose result stands at tokens, (rows, positions, ...), and what they become.
BY_TOKEN: dict[str, Callable[[Any, Case], Any]] = {
    "arithmetic with numbers": lambda x, c: 2 * x + 1 - x / 3,
    "reflected": lambda x, c: 1 - (2 / (x + 9)),
    "negative and absolute": lambda x, c: -x.abs(),
    "powers": lambda x, c: (x**2 + 1) ** 0.5,
    "with a value of each position": lambda x, c: x * torch.arange(15.0).view(3, 5, 1),
    "with a value of each row": lambda x, c: x + torch.arange(3.0).view(3, 1, 1),
    "with a value of each column": lambda x, c: x - torch.arange(5.0).view(5, 1),
    "with a value of each feature": lambda x, c: x * torch.arange(4.0),
    "with itself": lambda x, c: x * x + x,
    "exp and log": lambda x, c: torch.log(torch.exp(x) + 1),
    "activations": lambda x, c: F.gelu(x) + F.relu(x) + F.silu(x) + torch.tanh(x) + torch.sigmoid(x),
    "clamp": lambda x, c: x.clamp(-0.5, 0.5) + x.clamp(min=0),
    "where": lambda x, c: torch.where(x > 0, x, x * 0.1),
    "masked fill": lambda x, c: x.masked_fill(c.wide.logical_not(), -1e9),
    "maximum": lambda x, c: torch.maximum(x, torch.zeros(()).expand(4)),
    "softmax": lambda x, c: F.softmax(x, -1) + x.softmax(dim=2),
    "log_softmax": lambda x, c: F.log_softmax(x, dim=-1),
    "logsumexp": lambda x, c: x.logsumexp(-1),
    "max over features": lambda x, c: x.max(-1).values,
    "amax": lambda x, c: x.amax(-1, keepdim=True),
    "topk": lambda x, c: x.topk(2, dim=-1).values,
    "sorted features": lambda x, c: x.sort(-1).values,
    "sum over features": lambda x, c: x.sum(-1),
    "mean over features": lambda x, c: x.mean(2, keepdim=True),
    "variance of features": lambda x, c: x.var(-1, unbiased=False),
    "norm of features": lambda x, c: x.norm(dim=-1),
    "vector norm": lambda x, c: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x, c: F.normalize(x, dim=-1),
    "cosine similarity": lambda x, c: F.cosine_similarity(x, x * 2 + 1, dim=-1),
    "gather": lambda x, c: x.gather(-1, c.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1),
    "gather by name": lambda x, c: torch.gather(x, dim=2, index=c.labels.clamp(min=0)[..., None]),
    "take_along_dim": lambda x, c: torch.take_along_dim(x, c.labels.clamp(min=0)[..., None], dim=-1),
    "casts": lambda x, c: x.double().to(torch.float32).float(),
    "type of another": lambda x, c: x.type_as(torch.zeros(1, dtype=torch.float64)),
    "contiguous clone": lambda x, c: x.contiguous().clone(),
    "merged and split again": lambda x, c: x.view(-1, FEATURES).exp().view(ROWS, POSITIONS, FEATURES),
    "flattened": lambda x, c: x.flatten(0, 1).reshape(ROWS, POSITIONS, 2, 2),
    "unsqueezed": lambda x, c: (x.unsqueeze(-1) * torch.ones(3)).squeeze(-2),
    "features transposed": lambda x, c: x.view(ROWS, POSITIONS, 2, 2).transpose(-1, -2),
    "features transposed as a matrix": lambda x, c: x.view(ROWS, POSITIONS, 2, 2).mT,
    "where, as a method": lambda x, c: x.where(x > 0, torch.tensor(0.5)),
    "parts of features": lambda x, c: x[..., 1:3] + x[:, :, :2],
    "one feature": lambda x, c: x[..., 0],
    "split features": lambda x, c: torch.cat(x.split(2, dim=-1)[::-1], dim=-1),
    "chunked features": lambda x, c: x.chunk(2, dim=2)[1],
    "chunked positions": lambda x, c: torch.cat([p.exp() for p in x.view(-1, 4).split(4)]).view(ROWS, POSITIONS, 4),
    "put together with nothing": lambda x, c: torch.cat([x]).exp(),
    "rows in two parts": lambda x, c: torch.cat([x[:2].exp(), x[2:]]),
    "rows one by one": lambda x, c: torch.stack([row.logsumexp(-1) for row in x]),
    "rows by their numbers": lambda x, c: torch.stack([x[0], x[-2] * 2, x[2, :, :]], dim=-3),
    "narrowed features": lambda x, c: x.narrow(-1, 1, 2),
    "features by their numbers": lambda x, c: x.index_select(-1, torch.tensor([3, 0, 3])),
    "linear": lambda x, c: F.linear(x, c.head, torch.ones(6)),
    "matmul": lambda x, c: x @ c.head.t(),
    "layer norm": lambda x, c: F.layer_norm(x, (FEATURES,), torch.ones(4), torch.zeros(4)),
    "rms norm": lambda x, c: F.rms_norm(x, (FEATURES,)),
    "dropout of nothing": lambda x, c: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
    "losses of each entry": lambda x, c: (
        F.mse_loss(x, x.detach() * 0, reduction="none")
        + F.kl_div(x, torch.full((ROWS, POSITIONS, FEATURES), 0.1), reduction="none")
    ),
    "zeros like": lambda x, c: torch.zeros_like(x) + torch.ones_like(x) * x,
    "written by a mask": lambda x, c: _written(x * 1, c),
    "changed in place": lambda x, c: (x * 1).div_(2).masked_fill_(c.wide.logical_not(), 0.0).add_(1),
}

# Uses whose result has no positions left.
PLAIN: dict[str, Callable[[Any, Case], Any]] = {
    "loss with labels ignored at pads": lambda x, c: F.cross_entropy(x.view(-1, FEATURES), c.labels.view(-1)),
    "the same, shifted": lambda x, c: F.cross_entropy(
        x[:, :-1, :].contiguous().view(-1, FEATURES), _shifted(c).reshape(-1)
    ),
    "the same, through ellipsis": lambda x, c: F.cross_entropy(
        x[..., :-1, :].reshape(-1, FEATURES).float(), _shifted(c).flatten(), reduction="sum"
    ),
    "loss over transposed logits": lambda x, c: F.cross_entropy(x.transpose(1, 2), c.labels),
    "loss over permuted logits": lambda x, c: F.cross_entropy(x.permute(0, 2, 1), c.labels),
    "loss with smoothing and weights": lambda x, c: F.cross_entropy(
        x.view(-1, 4), c.labels.view(-1), weight=torch.arange(1.0, 5), label_smoothing=0.1
    ),
    "nll": lambda x, c: F.nll_loss(x.log_softmax(-1).view(-1, 4), c.labels.view(-1)),
    "loss of each token, summed": lambda x, c: F.cross_entropy(
        x.view(-1, 4), c.labels.view(-1), reduction="none"
    ).sum(),
    "loss of each token, meaned over all": lambda x, c: F.cross_entropy(
        x.transpose(1, 2), c.labels, reduction="none"
    ).mean(),
    "product with the mask": lambda x, c: (x * c.wide).sum() / c.mask.sum(),
    "product with the mask as numbers": lambda x, c: (x.logsumexp(-1) * c.mask.float()).sum(1) / c.mask.sum(1),
    "zeroed by where": lambda x, c: torch.where(c.wide, x, 0.0).mean(),
    "zeroed by where with zeros": lambda x, c: torch.where(c.wide, x, torch.zeros_like(x)).sum((0, 1)),
    "zeroed by where the other way": lambda x, c: torch.where(~c.wide, torch.tensor(0.0), x).sum(),
    "zeroed by masked_fill": lambda x, c: x.masked_fill(~c.wide, 0).sum(dim=1),
    "zeroed by a write": lambda x, c: _written(x.gather(2, c.labels.clamp(min=0)[..., None]).squeeze(2), c).sum(1),
    "product with a mask as wide as the value": lambda x, c: (
        (x * c.wide.expand(x.size()).float()).sum(1) / torch.clamp(c.wide.expand(x.size()).float().sum(1), min=1e-9)
    ),
    "masked mean of rows": lambda x, c: (x * c.wide).sum(1) / c.mask.sum(1, keepdim=True),
    "masked sum over rows": lambda x, c: (x * c.wide).sum(dim=0),
    "masked sum, dims kept": lambda x, c: (x * c.wide).sum(dim=(1, 2), keepdim=True),
    "masked mean, dims kept": lambda x, c: (x * c.wide).mean(keepdim=True, dim=(0, 1, 2)),
    "difference of two zeroed": lambda x, c: ((x.exp() * c.wide) - (x * c.wide)).sum(),
    "indexing by a mask": lambda x, c: x[c.mask].mean(),
    "indexing by labels that count": lambda x, c: x.exp()[c.labels != -100],
    "indexing by a computed mask": lambda x, c: x[(x.sum(-1) > 0) & c.mask],
    "masked_select": lambda x, c: x.sum(-1).masked_select(c.mask),
    "a position that is a token everywhere": lambda x, c: x[:, 1] * 2,
    "the same from the end": lambda x, c: x[:, -4, :2],
    "last tokens": lambda x, c: x[torch.arange(ROWS), torch.tensor([4, 2, 2])],
    "last tokens, by a range": lambda x, c: x[range(ROWS), torch.tensor([-1, 2, 1])],
    "accuracy": lambda x, c: ((x.argmax(-1) == c.labels) & c.mask).sum(),
    "accuracy by indexing": lambda x, c: (x.argmax(-1) == c.labels)[c.mask].float().mean(),
    "anything true": lambda x, c: ((x > 0).any(-1) & c.mask).any(),
    "counted": lambda x, c: torch.count_nonzero((x > 0) * c.wide),
    "sums of integers": lambda x, c: (x.argmax(-1) * c.mask).sum(1),
    "entropy of a part of the positions": lambda x, c: (
        (-(x.softmax(-1) * x.log_softmax(-1)).sum(-1))[:, 1:] * c.mask[:, 1:]
    ).sum(),
    "rows one half each": lambda x, c: (x.sum(-1) * c.mask)[:2].sum(1) - (x.sum(-1) * c.mask).chunk(3, dim=0)[2].sum(),
    "one row": lambda x, c: (x[1].exp() * c.wide[1]).sum(),
    "part of a row": lambda x, c: (x[-1, 1:, 2] * c.mask[2, 1:]).sum(),
    "rows put together": lambda x, c: (torch.cat([x, 2 * x]) * torch.cat([c.wide, c.wide])).sum(1),
    "parts in another order": lambda x, c: _masked_sums(x.view(15, FEATURES).split(5)[::-1], c, [10, 5, 0]),
    "not all the parts": lambda x, c: _masked_sums(x.view(15, FEATURES).split(5)[:2], c, [0, 5]),
    "rows by indices": lambda x, c: (x[torch.tensor([2, 0, 2])].exp() * c.wide[[2, 0, 2]]).sum(1),
    "rows selected": lambda x, c: (x.index_select(0, torch.tensor([2, 0, 2])).exp() * c.wide[[2, 0, 2]]).sum(1),
    "no rows": lambda x, c: x[torch.empty(0, dtype=torch.long)].sum((0, 1)) + _of_first_row(x, c),
    "no rows selected": lambda x, c: x.index_select(0, torch.empty(0, dtype=torch.long)).sum() + _of_first_row(x, c),
    "rows by a list": lambda x, c: (x[[0, -1]] * c.wide[[0, -1]]).sum(0),
    "rows in another order": lambda x, c: (torch.stack([x[2], x[0]]) * torch.stack([c.wide[2], c.wide[0]])).sum(0),
    "sum in float64": lambda x, c: (x * c.wide).sum(dtype=torch.float64),
    # Zero times something is zero only where that is finite.
    "ratios times advantages": lambda x, c: (
        (torch.minimum(x.exp(), x.exp().clamp(0.8, 1.2)) * torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1)) * c.wide
    ).sum() / c.mask.sum(),
    "an estimate of a divergence": lambda x, c: ((torch.exp(-x) + x - 1) * c.wide).sum(),
    "divided by the lengths of rows": lambda x, c: ((x * c.wide) / c.mask.sum(1).view(3, 1, 1)).sum(),
    "focal": lambda x, c: ((1 - x.softmax(-1)) ** 2 * x.log_softmax(-1) * c.wide).sum(),
    "a power of two": lambda x, c: (2**x * c.wide + torch.pow(3.0, x) * c.wide).sum(),
    "remainders": lambda x, c: ((x * c.wide) % 2 + torch.fmod(x, 3) * c.wide).sum(),
    "logarithm of zeros and one": lambda x, c: (x * c.wide).square().log1p().sum(),
    "exponential of zeros less one": lambda x, c: (x * c.wide).expm1().sum(),
    "a logarithm, zeroed": lambda x, c: torch.where(c.wide, x.exp().log(), 0.0).sum(),
    "infinity in place of pads, zeroed": lambda x, c: torch.where(c.wide, _at_pads(x, c, -torch.inf), 0.0).sum(),
    "infinity in place of pads, overwritten": lambda x, c: _at_pads(_at_pads(x, c, torch.inf), c, 0.0).sum(),
    "infinity in place of tokens": lambda x, c: (x.masked_fill(c.labels.eq(0)[..., None], torch.inf) * c.wide).sum(),
    "numbers in place of what is none": lambda x, c: (torch.nan_to_num(_at_pads(x, c, torch.nan)) * c.wide).sum(),
    "whether it is infinite": lambda x, c: (_at_pads(x, c, torch.inf).isinf() * c.wide).sum(),
}  # fmt: skip

# Uses that see pads.
ANYTHING: dict[str, Callable[[Any, Case], Any]] = {
    "mean of all": lambda x, c: x.mean(),
    "mean of rows": lambda x, c: x.mean(1),
    "maximum of all": lambda x, c: x.max(),
    "maximum over positions": lambda x, c: x.max(1).values,
    "sum of squares": lambda x, c: x.square().sum(),
    "loss that counts pads": lambda x, c: F.cross_entropy(x.view(-1, 4), c.labels.clamp(min=0).view(-1)),
    "soft targets": lambda x, c: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.25), reduction="batchmean"),
    "first position of left padded rows": lambda x, c: x[:, 0],
    "a pad by its index": lambda x, c: x[torch.arange(ROWS), torch.tensor([4, 4, 2])],
    "mask that is on at a pad": lambda x, c: x[torch.ones_like(c.mask)],
    "product with a mask that is on at a pad": lambda x, c: (x * torch.ones_like(c.wide)).sum(),
    "division of zeros by zeros": lambda x, c: ((x * c.wide) / c.wide.float()).sum(),
    "zeros plus one": lambda x, c: (x * c.wide + 1).sum(),
    "exp of zeros": lambda x, c: (x * c.wide).exp().sum(),
    "softmax over positions": lambda x, c: x.softmax(1),
    "running sum": lambda x, c: x.cumsum(1),
    "shift": lambda x, c: x.roll(1, 1),
    "flip": lambda x, c: x.flip(1),
    "every other position": lambda x, c: x[:, ::2],
    "numpy": lambda x, c: torch.as_tensor(x.detach().numpy()),
    "list": lambda x, c: torch.tensor(x.tolist()),
    "not a number anywhere": lambda x, c: x.isnan().any(),
    "einsum": lambda x, c: torch.einsum("bsf,f->bs", x, torch.ones(4)),
    "stacked": lambda x, c: torch.stack([x, x]),
    "rows and positions swapped": lambda x, c: x.transpose(0, 1),
    "all features in one": lambda x, c: x.view(ROWS, -1),
    "batch matrix product": lambda x, c: x @ x.transpose(1, 2),
    "changed in place behind a view": lambda x, c: _changed_behind_a_view(x),
    "activation in place": lambda x, c: F.relu(x * 1, inplace=True),
    "a mask changed after it was used": lambda x, c: _mask_changed_later(x.detach(), c),
    "a loss of labels changed after": lambda x, c: _labels_changed_later(x.detach(), c),
    # Zero times infinity.
    "infinity times the mask": lambda x, c: (_at_pads(x, c, -torch.inf) * c.wide).sum(),
    "NaN times the mask": lambda x, c: (_at_pads(x, c, torch.nan).sum(-1) * c.mask).mean(),
    "NaN of another side times the mask": lambda x, c: (torch.where(c.wide, x, torch.nan) * c.wide).sum(),
    "infinity through functions": lambda x, c: (_at_pads(x, c, -torch.inf).log_softmax(-1)[..., 1] * c.mask).sum(),
    "infinity through a loss": lambda x, c: (
        F.mse_loss(_at_pads(x, c, torch.inf), x.detach(), reduction="none") * c.wide
    ).sum(),
    "infinity picked": lambda x, c: (_at_pads(x, c, torch.inf).gather(2, c.labels.clamp(0)[..., None]) * c.wide).sum(),
    "zeros times NaN at pads": lambda x, c: ((x * c.wide) * torch.where(c.wide, 1.0, torch.nan)).sum(),
    "infinite factors at pads, zeroed": lambda x, c: (x * torch.where(c.wide, 1.0, torch.inf) * c.wide).sum(),
    "zeros times infinity": lambda x, c: ((x * c.wide) * float("inf")).sum(),
    "zeros times a tensor that is infinite": lambda x, c: ((x * c.wide) * torch.tensor(torch.inf)).sum(),
    "an infinite factor of each feature": lambda x, c: ((x * c.wide) * torch.tensor([1.0, torch.inf, 1, 1])).sum(),
    "zeros divided by the number zero": lambda x, c: ((x * c.wide) / 0.0).sum(),
    "a quotient by zero at pads": lambda x, c: ((x / c.wide.float()) * c.wide).sum(),
    "a quotient by who knows what": lambda x, c: ((x / x.detach().sum(-1, keepdim=True)) * c.wide).sum(),
    "a reciprocal": lambda x, c: ((1 / x) * c.wide).sum() + (x.reciprocal() * c.wide).sum(),
    "a logarithm": lambda x, c: (x.log() * c.wide).sum(),
    "a logarithm of more than one": lambda x, c: (x.log1p() * c.wide).sum(),
    "a root": lambda x, c: ((x**0.5) * c.wide).sum(),
    "a power below zero": lambda x, c: ((x**-1) * c.wide).sum(),
    "an exponential in half precision": lambda x, c: ((x.detach().half() * 30).exp() * c.wide).sum(),
    # What is not followed, though some of it would do without pads.
    "a new dimension in front": lambda x, c: x[None],
    "a position of some rows": lambda x, c: x[1:, 1],
    "a part without a token": lambda x, c: x[2:, :1],
    "a mask of features": lambda x, c: x[x > 0],
    "masked_select of features": lambda x, c: x.masked_select(c.wide),
    "indices of two dimensions": lambda x, c: x[torch.tensor([[0]]), torch.tensor([[1]])],
    "one index of each": lambda x, c: x[torch.tensor(0), torch.tensor(1)],
    "an index of a feature": lambda x, c: x[torch.tensor([0]), torch.tensor([1]), 0],
    "a slice of swapped positions": lambda x, c: x.transpose(1, 2)[:, :2],
    "narrow of swapped positions": lambda x, c: x.transpose(1, 2).narrow(1, 0, 2),
    "split of swapped positions": lambda x, c: torch.cat(x.transpose(1, 2).split(2, 1), 1),
    "chunks of swapped positions": lambda x, c: torch.cat(x.transpose(1, 2).chunk(2, 1), 1),
    "swapped positions put together": lambda x, c: torch.cat([x.transpose(1, 2), x.transpose(1, 2)], 1),
    "rows put together along positions": lambda x, c: torch.cat([x, x], 1),
    "bits": lambda x, c: x.detach().view(torch.int32),
    "a shape of swapped positions": lambda x, c: x.transpose(1, 2).reshape(ROWS, -1),
    "swapped positions merged": lambda x, c: x.transpose(1, 2).flatten(1),
    "a dimension behind swapped positions": lambda x, c: x.transpose(1, 2).unsqueeze(-1),
    "a dimension before rows": lambda x, c: x.unsqueeze(0),
    "every dimension of one": lambda x, c: x.squeeze(),
    "a row as a dimension of one": lambda x, c: x.squeeze(0),
    "merged positions swapped": lambda x, c: x.view(15, FEATURES).transpose(0, 1),
    "another order": lambda x, c: x.permute(1, 0, 2),
    "a layer over positions": lambda x, c: F.linear(x.transpose(1, 2), torch.ones(2, POSITIONS)),
    "weights that are tokens": lambda x, c: F.linear(torch.ones(2, FEATURES), x.view(15, FEATURES)),
    "a norm over positions": lambda x, c: F.layer_norm(x.transpose(1, 2), (POSITIONS,)),
    "softmax of swapped positions": lambda x, c: x.transpose(1, 2).softmax(2),
    "a norm of all": lambda x, c: x.norm(),
    "similarity along positions": lambda x, c: F.cosine_similarity(x, 2 * x, dim=1),
    "picked along positions": lambda x, c: x.gather(1, torch.zeros(ROWS, 1, FEATURES, dtype=torch.long)),
    "labels that are shares": lambda x, c: F.cross_entropy(x.view(15, FEATURES), torch.full((15, FEATURES), 0.25)),
    "a loss of broadcast targets": lambda x, c: (x - torch.zeros(FEATURES)).square().mean(),
}  # fmt: skip


def _at_pads(x: Any, case: Case, value: float) -> Any:
    return x.masked_fill(~case.wide, value)


def _shifted(case: Case) -> torch.Tensor:
    return case.labels[:, 1:].masked_fill(~case.mask[:, :-1], -100)


def _masked_sums(parts: Any, case: Case, starts: list[int]) -> torch.Tensor:
    """The sums over tokens of parts of five merged positions each, which begin at `starts`, put together."""
    mask = torch.cat([case.mask.view(-1)[start : start + 5] for start in starts])
    return (torch.cat(parts) * mask[:, None]).sum(0)


def _of_first_row(x: Any, case: Case) -> torch.Tensor:
    """The sum of the tokens of one row, which has gradients."""
    return (x[0] * case.wide[0]).sum(0)


def _written(x: Any, case: Case) -> Any:
    x[~case.mask] = 0.0
    return x


def _changed_behind_a_view(x: Any) -> Any:
    whole = x * 1
    part = whole[:, 1:]
    whole.mul_(3)
    return part.sum()


def _mask_changed_later(x: Any, case: Case) -> Any:
    mask = case.wide.clone()
    masked = x * mask
    mask.fill_(True)
    return masked.sum()


def _labels_changed_later(x: Any, case: Case) -> Any:
    labels = case.labels.clone()
    losses = F.cross_entropy(x.view(-1, 4), labels.view(-1), reduction="none")
    labels.fill_(0)
    return losses.exp().mean()


def scalar(value: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A number that every entry has a different part in."""
    if not value.requires_grad:
        return torch.zeros((), requires_grad=True)
    factors = torch.linspace(0.5, 2, value.numel()).view(value.shape)
    if mask is not None:
        value, factors = value[mask], factors[mask]
    return (value * factors).sum()


def assert_same_gradient(case: Case) -> None:
    wanted = case.eager.grad if case.eager.grad is not None else torch.zeros_like(case.eager)
    found = case.base.grad if case.base.grad is not None else torch.zeros_like(case.base)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_what_works_token_by_token_asks_for_no_pad(name: str) -> None:
    case = Case(exact=False)
    found, wanted = BY_TOKEN[name](case.object, case), BY_TOKEN[name](case.eager, case)
    assert is_deferred(found)
    assert (found.shape, found.dtype, found.requires_grad) == (wanted.shape, wanted.dtype, wanted.requires_grad)
    torch.testing.assert_close(found[MASK], wanted[MASK], rtol=1e-5, atol=1e-6)
    scalar(found, MASK).backward()
    scalar(wanted, MASK).backward()
    assert_same_gradient(case)
    assert case.asked == 0
    assert case.events.state.uses is Uses.TOKENS


@pytest.mark.parametrize("name", BY_TOKEN)
def test_what_was_made_of_tokens_is_eagers_at_pads_once_they_are_looked_at(name: str) -> None:
    case = Case(exact=True)
    found, wanted = BY_TOKEN[name](case.object, case), BY_TOKEN[name](case.eager, case)
    torch.testing.assert_close(torch.tensor(found.tolist()), torch.tensor(wanted.tolist()), rtol=1e-5, atol=1e-6)
    scalar(found).backward()
    scalar(wanted).backward()
    assert_same_gradient(case)
    assert case.asked == 1
    assert case.events.state.uses is Uses.PADS


@pytest.mark.parametrize("name", PLAIN)
def test_what_sees_tokens_only_asks_for_no_pad(name: str) -> None:
    case = Case(exact=False)
    found, wanted = PLAIN[name](case.object, case), PLAIN[name](case.eager, case)
    assert type(found) is torch.Tensor
    assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    scalar(found).backward()
    scalar(wanted).backward()
    assert_same_gradient(case)
    assert case.events.state.uses is Uses.TOKENS


WITHOUT_GRADIENTS = (  # numbers of what has none
    "not a number anywhere", "a mask changed after it was used", "a loss of labels changed after",
    "an exponential in half precision",
)  # fmt: skip


@pytest.mark.parametrize("name", ANYTHING)
def test_what_sees_pads_gets_eagers_numbers(name: str) -> None:
    case = Case(exact=True)
    found, wanted = ANYTHING[name](case.object, case), ANYTHING[name](case.eager, case)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    if wanted.requires_grad and not wanted.isnan().any():
        scalar(found).backward()
        scalar(wanted).backward()
        assert_same_gradient(case)
    assert case.asked == 1
    assert case.events.state.uses is (Uses.VALUES if name in WITHOUT_GRADIENTS else Uses.PADS)


def test_every_function_of_the_table_has_a_use_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Any] = set()
    run = pad_safe.run

    def noting(function: Any, args: Any, kwargs: Any) -> Any:
        result = run(function, args, kwargs)
        if result is not NotImplemented:
            seen.add(pad_safe.TABLE[function])
        return result

    monkeypatch.setattr(pad_safe, "run", noting)
    for name, use in (BY_TOKEN | PLAIN).items():
        case = Case(exact=True)
        assert use(case.object, case) is not None, name
    assert set(pad_safe.TABLE.values()) <= seen


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.view(7, -1),
        lambda x: x.softmax(9),
        lambda x: x @ torch.ones(3, 3),
        lambda x: x.index_select(0, torch.tensor([-1])),
        lambda x: x.index_select(-1, torch.tensor([9])),
    ],
)
def test_a_wrong_call_raises_what_eager_raises(use: Callable[[Any], Any]) -> None:
    case = Case(exact=True)
    with pytest.raises((RuntimeError, IndexError)) as wanted:
        use(case.eager)
    with pytest.raises(type(wanted.value)) as found:
        use(case.object)
    assert str(found.value) == str(wanted.value)


def test_one_use_of_each_kind_adds_up_to_eagers_gradient() -> None:
    case = Case(exact=True)
    for x in (case.object, case.eager):
        safe = F.cross_entropy(x.view(-1, FEATURES), case.labels.view(-1))
        (safe + x.logsumexp(-1).square().mean() + (x * case.wide).sum()).backward()
    assert_same_gradient(case)
    assert case.asked == 1


def test_factors_that_have_changed_since_are_not_taken_for_finite() -> None:
    case = Case(exact=True)
    factors = torch.ones(ROWS, POSITIONS, 1)
    masked = case.object.detach() * factors * case.wide
    factors[~case.wide] = torch.nan
    with pytest.raises(DeferredError, match="changed in place"):
        masked.sum()


def test_many_sums_in_a_row_are_followed() -> None:
    case = Case(exact=False)
    total, wanted = (x * case.wide for x in (case.object, case.eager))
    for _ in range(300):
        total, wanted = total + case.object * case.wide, wanted + case.eager * case.wide
    torch.testing.assert_close(total.sum(), wanted.sum())


def test_half_precision_sums_are_kept_in_float32() -> None:
    case = Case(exact=False, dtype=torch.bfloat16)
    for reduce in (lambda x: (x * case.wide).sum(), lambda x: (x * case.wide).sum(1), lambda x: (x * case.wide).mean()):
        found, wanted = reduce(case.object), reduce(case.eager)
        assert found.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_two_values_of_one_batch_meet_at_their_tokens_and_of_two_batches_padded() -> None:
    one, same, other = Case(exact=True), Case(exact=True), Case(exact=True)
    assert is_deferred(one.object * same.object)
    assert one.asked == same.asked == 0
    shifted = MASK.roll(1, 1)
    place = Place((ROWS, POSITIONS), shifted.flatten().nonzero().squeeze(1))
    elsewhere = defer(
        other.eager.shape, lambda: other.eager * 1, dtype=torch.float32, device="cpu", requires_grad=True,
        tokens=lambda: Tokens.of(place, place.take(other.eager)),
    )  # fmt: skip
    torch.testing.assert_close(one.object * elsewhere, one.eager * other.eager)


def test_under_no_grad_nothing_has_a_gradient_and_later_uses_have() -> None:
    case = Case(exact=False)
    with torch.no_grad():
        hits = (case.object.argmax(-1) == case.labels) & case.mask
        entropy = -(case.object.softmax(-1) * case.object.log_softmax(-1)).sum(-1)
    assert not entropy.requires_grad
    assert int(hits.sum()) == int(((case.eager.argmax(-1) == case.labels) & case.mask).sum())
    assert case.object.logsumexp(-1).requires_grad
