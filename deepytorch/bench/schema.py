"""The layout of a result file, checked when it is written and when it is read."""

from __future__ import annotations

from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from deepytorch.bench.json_results import is_number, match_fields, read_json, require, write_json
from deepytorch.errors import DataError

ONE_BY_ONE, BACK_TO_BACK = "one by one", "back to back"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadResult:
    """The result of `deepytorch bench unpad`. Ratios of time are "the other's time / deepytorch's": above 1 is faster.

    A time of an arm is the sum over the batches of the median over the rounds, so a ratio compares whole runs over the
    same data. None stands for values that were not measured; `not_run` says why.
    """

    model: str
    device: str
    dtype: str
    batch_size: int
    real_token_fraction: float  # tokens / (rows x positions), over all batches; both sides of an encoder-decoder count
    ratio_vs_eager: float
    ratio_vs_inductor: float
    ratio_vs_handpacked: float | None
    max_loss_rel_diff: float  # |loss - eager's| / |eager's|, the largest of the batches
    max_grad_rel_diff: float  # ||g - eager's|| / ||eager's||, the largest of all parameters and batches
    recompiles: int
    steps_packed: int
    steps_padded: int
    compile_seconds: float  # of deepytorch: the batches' first pass, from empty caches, minus their later steady times
    compile_seconds_inductor: float  # likewise, of stock torch.compile
    peak_memory_ratio_vs_eager: float  # deepytorch's peak of tensor bytes beyond the weights / eager's: below 1 is less
    # beyond what was asked for
    labels: str
    loss: (
        str  # "model": the model's own; "outside": a loop's, labels ignored at pads; "everywhere": one that counts pads
    )
    token_ceiling: float  # 1 / real_token_fraction: the gain that dropping pads alone could give, without attention
    labelled_fraction: float  # labels that are not ignored / tokens
    ratio_no_padding: float  # stock torch.compile's time / deepytorch's on batches where every position is a label
    host_ms_per_step: float  # of deepytorch, outside the compiled graph
    grad_rel_diffs: dict[str, float]  # arm -> its max_grad_rel_diff: that of stock shows the effect of rounding alone
    step_ms: dict[str, float]  # arm -> mean over the batches of the median over the rounds
    ratio_quartiles: dict[str, list[float]]  # arm -> quartiles over the batches of that batch's ratio
    peak_bytes: dict[str, int]  # arm -> most bytes that one step held beyond the weights
    steps: int
    rounds: int
    max_length: int
    model_size: str
    torch_version: str
    machine: str
    # fields that files of older versions lack
    weights: str = "fp32"
    vocab_size: int = 8192
    timing: str = ONE_BY_ONE
    tokens_per_s: dict[str, float] = field(default_factory=dict)  # arm -> tokens (no pads) per second
    ratio_vs_grouped: float | None = (
        None  # against stock torch.compile on the same rows, those of like lengths together
    )
    ratio_vs_flattened: float | None = None
    not_run: dict[str, str] = field(default_factory=dict)  # arm -> why it was not measured

    def __post_init__(self) -> None:
        """Raise `DataError` for a value that no run can give."""
        for name, kind in get_type_hints(type(self)).items():
            _check(name, getattr(self, name), kind)
        if not 0 < self.real_token_fraction <= 1:
            raise DataError(f"real_token_fraction is {self.real_token_fraction}, expected above 0 and at most 1.")

    @staticmethod
    def from_json(content: Any) -> UnpadResult:
        """Return the result that the JSON value `content` holds. Raises `DataError` for another layout."""
        newer = {each.name for each in fields(UnpadResult) if _has_default(each)}
        older = isinstance(content, dict) and not newer & set(content)
        match_fields({**content, **dict.fromkeys(newer)} if older else content, UnpadResult, "result")
        return UnpadResult(**content)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return asdict(self)


def _has_default(given: Field[Any]) -> bool:
    return given.default is not MISSING or given.default_factory is not MISSING


def read_result(path: Path) -> UnpadResult:
    """Read a result file. Raises `DataError` when it cannot be read or has another layout."""
    return UnpadResult.from_json(read_json(path))


def write_result(path: Path, result: UnpadResult) -> None:
    """Write `result` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    write_json(path, result.to_json())


def _check(name: str, value: Any, kind: Any) -> None:
    if kind is str:
        require(isinstance(value, str), "result", name, value, "text")
    elif kind is int:
        require(is_number(value) and isinstance(value, int) and value >= 0, "result", name, value, "a count")
    elif kind is float:
        require(is_number(value) and value >= 0, "result", name, value, "a finite number, 0 or more")
    elif kind == float | None:
        require(
            value is None or (is_number(value) and value >= 0),
            "result",
            name,
            value,
            "a finite number, 0 or more, or null",
        )
    elif kind == dict[str, str]:
        texts = isinstance(value, dict) and all(isinstance(each, str) for pair in value.items() for each in pair)
        require(texts, "result", name, value, "texts by the name of an arm")
    else:
        require(
            isinstance(value, dict) and _numbers_only(value),
            "result",
            name,
            value,
            "finite numbers by the name of an arm",
        )


def _numbers_only(value: dict[Any, Any]) -> bool:
    entries = (item if isinstance(item, list) else [item] for item in value.values())
    return all(isinstance(key, str) for key in value) and all(is_number(number) for row in entries for number in row)
