"""The configuration that `mode=` and `options=` of `torch.compile` give, checked before anything is compiled."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from deepytorch.config import Environment
from deepytorch.errors import ConfigError

Lowering = Literal["inductor", "aot_eager", "eager"]
LOWERINGS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompilerConfig:
    """The compiler options of one `torch.compile` call.

    `lowering`: what makes code of a graph; for debugging, "aot_eager" runs what AOTAutograd makes of it operator by
    operator, and "eager" the rewritten graph itself, under autograd; nothing reduces gradients in it.
    `mode`: one of `torch.compile`'s modes, with Inductor's meaning; it may stand among the options.
    `unpad`: strip padding.
    `fuse_loss`: compute a loss and the linear layer before it together, piece by piece, where nothing else reads the
    logits and they would take a gigabyte or more: a fraction of the memory, in the same time (`deepytorch bench loss`);
    a third more work where each row's loss is asked for; in float32 on a CPU from 1 MB of logits on, since it is faster
    there; where None, in packed regions for that reason alone.
    `loss_rows`: leave out rows of the loss whose label is ignored.
    `defer_outputs`: compute an output that the loss does not need, such as logits, at its first use.
    `min_padding`: the padded step runs for a batch whose fraction of padded positions, from 0 to 1, is below this.
    `round_sizes`: fill packed batches up with pads to one of a few sizes, at most an eighth more tokens, so that a CUDA
    graph is recorded for each size once; where None, on CUDA devices if CUDA graphs are asked for.
    `activation_memory`: the most activations that compiled code holds from a forward for its backward, as a share of
    what it would hold; the others are computed again in the backward, those first that cost least for their size.
    `reduce_gradients`: average the gradients of a DistributedDataParallel module inside its compiled backward.
    `tune`: of a region that is not packed, on a CPU, run compiled code, or convolutions with the channels of their
    images last, only where training steps are faster with it: they are measured, in turns, by the ranks of a
    DistributedDataParallel module together, and a clear outcome is kept on disk. Where off, under
    `torch.use_deterministic_algorithms`, or among ranks of another kind, compiled code runs once it is there.
    `wait`: compile before a step runs, as `torch.compile` does; else steps run in eager until another process, or for
    a GPU this one, has compiled them. None: as `DEEPYTORCH_COMPILE` says.
    `gpu_background`: for a GPU, too, another process compiles while steps run in eager: from sizes and properties of
    the device alone, with a CUDA context of its own; matrix products that cannot be timed there are not padded. Not yet
    run on a GPU. None: as `DEEPYTORCH_GPU_COMPILE` says.
    `dump_graphs`: a directory that gets every graph before and after each pass.
    `inductor`: Inductor's own options, by the names of `torch._inductor.config`; they may stand among the others.
    """

    lowering: Lowering = "inductor"
    mode: str | None = None
    unpad: bool = True
    fuse_loss: bool | None = None
    loss_rows: bool = True
    defer_outputs: bool = True
    min_padding: float = 0.0
    round_sizes: bool | None = None
    activation_memory: float = 1.0
    reduce_gradients: bool = True
    tune: bool = True
    wait: bool | None = None
    gpu_background: bool | None = None
    dump_graphs: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _expect("lowering", self.lowering, self.lowering in LOWERINGS, f"one of {', '.join(LOWERINGS)}")
        _expect("mode", self.mode, self.mode is None or self.mode in MODES, f"one of {', '.join(MODES)}")
        for name in ("wait", "gpu_background", "round_sizes", "fuse_loss"):
            value = getattr(self, name)
            _expect(name, value, value is None or isinstance(value, bool), "True, False or None")
        for name in ("unpad", "loss_rows", "defer_outputs", "reduce_gradients", "tune"):
            value = getattr(self, name)
            _expect(name, value, isinstance(value, bool), "True or False")
        for name in ("min_padding", "activation_memory"):
            fraction = getattr(self, name)
            is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
            _expect(name, fraction, is_number and 0 <= fraction <= 1, "a fraction from 0 to 1")
        path = self.dump_graphs
        _expect("dump_graphs", path, path is None or (isinstance(path, str) and path != ""), "a directory")
        _expect("inductor", self.inductor, isinstance(self.inductor, Mapping), "a dict of Inductor's options")
        checked = {_inductor_name(name): value for name, value in self.inductor.items()}
        for name, value in checked.items():
            _check_inductor(name, value)
        if self.activation_memory < 1 and checked.get("custom_partitioner_fn") is not None:
            raise ConfigError(
                f"activation_memory is {self.activation_memory} and Inductor's custom_partitioner_fn is set; expected "
                "one of them, since both decide which activations are held: leave one out"
            )
        object.__setattr__(self, "inductor", checked)

    @classmethod
    def parse(
        cls,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> CompilerConfig:
        """Return the configuration for the arguments of a backend. Raises `ConfigError` for a wrong name or value."""
        if kwargs:
            raise ConfigError(
                f"the backend was called with {', '.join(sorted(kwargs))}; expected only mode and options: "
                "leave the others to torch.compile itself"
            )
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"options is {options!r}; expected a dict, such as options={{'lowering': 'aot_eager'}}")
        ours: dict[str, Any] = {}
        inductor: dict[str, Any] = {}
        for name, value in (options or {}).items():
            plain = name.replace("-", "_") if isinstance(name, str) else name
            if plain == "outputs":
                raise ConfigError(
                    f"option {name!r} is {value!r}; expected no such option, since outputs are eager's at pads, too, "
                    "and those that a script does not look at are not computed: leave it out"
                )
            if plain in _OPTIONS:
                ours[plain] = value
            else:
                inductor[_inductor_name(name)] = value
        if isinstance(ours.get("dump_graphs"), os.PathLike):
            ours["dump_graphs"] = os.fspath(ours["dump_graphs"])
        nested = ours.pop("inductor", {})
        _expect("inductor", nested, isinstance(nested, Mapping), "a dict of Inductor's options")
        if mode is not None and ours.get("mode", mode) != mode:
            raise ConfigError(
                f"mode is {mode!r} and {ours['mode']!r} among the options; expected one of them: leave one out"
            )
        return cls(**{"mode": mode, **ours}, inductor={**nested, **inductor})

    def inductor_options(self) -> dict[str, Any]:
        """Return the options for Inductor: those that the mode stands for, overridden by the user's."""
        # Whether padded matrix products are faster is timed on the device, while Inductor compiles.
        options: dict[str, Any] = {"shape_padding": False} if self.compiles_from_sizes else {}
        if self.mode not in (None, "default"):
            from deepytorch.torch_internals import list_mode_options

            options |= list_mode_options(self.mode)
        return {**options, **self.inductor}

    @property
    def records_graphs(self) -> bool:
        """Return whether Inductor is asked for CUDA graphs."""
        from deepytorch.torch_internals import inductor_config

        return bool(self.inductor_options().get("triton.cudagraphs", inductor_config.triton.cudagraphs))

    def rounds_sizes(self, on_cuda: bool) -> bool:
        """Return whether packed steps get a few sizes only. on_cuda: whether their batches are on a CUDA device."""
        if self.round_sizes is not None:
            return self.round_sizes
        return on_cuda and self.lowering == "inductor" and self.records_graphs

    @property
    def waits(self) -> bool:
        """Return whether graphs are compiled in place: on request, or if they run operator by operator anyway."""
        if self.lowering != "inductor":
            return True
        return Environment.read().wait if self.wait is None else self.wait

    @property
    def compiles_from_sizes(self) -> bool:
        """Return whether the process in the background compiles from sizes alone, which it can do for a GPU, too."""
        asked = Environment.read().gpu_background if self.gpu_background is None else self.gpu_background
        return asked and not self.waits

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON. Objects among Inductor's options stand as their `uuid()` or `repr`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["inductor"] = {name: _plain(value) for name, value in sorted(self.inductor.items())}
        return values

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))


_OPTIONS = frozenset(each.name for each in fields(CompilerConfig))


def _expect(name: str, found: object, accepted: bool, expected: str) -> None:
    if not accepted:
        raise ConfigError(f"{name} is {found!r}; expected {expected}")


def _inductor_name(name: object) -> str:
    """Return `name` as Inductor's configuration spells it. Raises `ConfigError`, with the nearest name, if unknown."""
    from deepytorch.torch_internals import inductor_config

    known = inductor_config.get_config_copy()
    plain = name.replace("-", "_") if isinstance(name, str) else ""
    if plain in known:
        return plain
    near = _nearest(plain, [*sorted(_OPTIONS), *known])
    hint = f"did you mean {near!r}?" if near else "leave it out"
    raise ConfigError(
        f"option {name!r} is not known; expected one of {', '.join(sorted(_OPTIONS))}, or an option of Inductor: {hint}"
    )


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _check_inductor(name: str, value: object) -> None:
    from deepytorch.torch_internals import inductor_config

    kind = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if kind is type(None):
        return  # Inductor does not declare the type of this option
    try:
        accepted = isinstance(value, kind) or (kind is float and isinstance(value, int))
    except TypeError:
        return  # a generic type, which isinstance does not know
    spelled = kind.__name__ if isinstance(kind, type) else str(kind)
    _expect(f"Inductor's option {name!r}", value, accepted, f"a value of type {spelled}")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    uuid = getattr(value, "uuid", None)
    return repr(uuid()) if callable(uuid) else repr(value)
