"""The layout of a result file of `deepytorch bench unpad`, checked when it is written and when it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepytorch.bench.results import Record

ONE_BY_ONE, BACK_TO_BACK = "one by one", "back to back"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpadResult(Record):
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
    loss: str  # the model's own, or a loop's: "outside" ignores labels at pads, "everywhere" counts them
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
    ratio_vs_grouped: float | None = None  # to stock torch.compile on the same rows, those of like lengths together
    ratio_vs_flattened: float | None = None
    not_run: dict[str, str] = field(default_factory=dict)  # arm -> why it was not measured

    def __post_init__(self) -> None:
        """Raise `DataError` for a value that no run can give."""
        Record.__post_init__(self)
        self.require(0 < self.real_token_fraction <= 1, "real_token_fraction", "above 0 and at most 1")
