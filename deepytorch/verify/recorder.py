"""The recorder of a script's training: every loss handed to backward, every gradient norm, the weights at the end.

The recorder changes nothing but what the job asks for: dropout, and the last bits of the weights.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from deepytorch.torch_internals import TracingContext, detect_fake_mode, wrap_engine_run_backward
from deepytorch.verify.records import MOVED, WITH, WITHOUT, Job

_PROOFS = "deepytorch.compiler.step.agreement"  # runs backwards of its own, to show that packed equals padded


class StepsDone(BaseException):
    """The exception that leaves the script from its optimizer once all steps are made.

    It is not an `Exception`, which scripts catch.
    """


class Recorder:
    """The recorder of one run. Call `attach` once, before the script starts, and `finish` when the script has ended."""

    def __init__(self, job: Job) -> None:
        self._job, self._pid = job, os.getpid()
        self._file = job.records.open("w", encoding="utf-8")
        self._step = 0
        self._finished = False
        self._optimizers: list[Optimizer] = []
        self._parameters: dict[int, list[Tensor]] = {}  # by the number of their optimizer
        self._stepping: list[Optimizer] = []
        self._moved: set[int] = set()
        self._inside = threading.local()
        self._draws = Draws() if job.role == WITHOUT else None

    def attach(self) -> None:
        """Begin to record."""
        wrap_engine_run_backward(self._looking_on)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        original, recorder = Optimizer.__init__, self

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            recorder._made(self)

        Optimizer.__init__ = __init__  # type: ignore[method-assign]

    def finish(self, how: str | None, failure: str | None = None) -> None:
        """Write the last records. how: "steps" or "script", as `Run.ended`; None: the run failed with `failure`."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        if how is not None:
            self._write_weights()
        if self._job.role == WITH and (ledger := _ledger()) is not None:
            self._write("report", report=ledger.report().to_json())
        self._write("ended", how=how, failure=failure)
        self._file.close()
        self._job.ended.touch()

    def leave_if_finished(self) -> None:
        """End the process if the script has caught `StepsDone` and goes on, although all steps are made."""
        if self._finished and os.getpid() == self._pid:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    # losses

    def _looking_on(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_and_look(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "backward", False) or os.getpid() != self._pid or _is_ours(roots):
                return run(roots, *args, **kwargs)
            self.leave_if_finished()
            self._inside.backward = True
            try:
                found = run(roots, *args, **kwargs)
            finally:
                self._inside.backward = False
            values = [each for each in roots if isinstance(each, Tensor) and each.numel() == 1]
            # Read after the backward: a value that is computed only for the backward exists by now.
            self._write("backward", step=self._step + 1, values=[float(each.detach()) for each in values])
            return found

        return run_and_look

    # optimizers

    def _made(self, optimizer: Optimizer) -> None:
        """Record an optimizer that has just been made."""
        if os.getpid() != self._pid or self._finished:
            return
        modules = living_modules()
        dropouts = 0 if self._job.options.dropout else sum(map(drop_nothing, modules))
        self._write("optimizer", name=type(optimizer).__name__, dropouts=dropouts)
        trained = _trained(optimizer)
        if self._job.role == MOVED:
            for number, each in enumerate(trained):
                if id(each) not in self._moved:
                    self._moved.add(id(each))
                    move_last_bit(each, seed=number)
        if self._draws is not None and not self._step:
            self._draws.watch(modules, trained)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if os.getpid() != self._pid:
            return None
        self.leave_if_finished()
        if optimizer in self._stepping:  # an earlier step of this optimizer has raised
            del self._stepping[self._stepping.index(optimizer) :]
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:  # an inner optimizer: the outer one's step counts
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._write_gradients(optimizer)
            return None

        def closure_and_look() -> Any:  # LBFGS, Lightning: gradients are made inside of the step
            found = closure()
            self._write_gradients(optimizer)
            return found

        if len(args) > 1:
            return (args[0], closure_and_look, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_look}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid or optimizer not in self._stepping:
            return
        del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping:
            return
        self._step += 1
        self._write("step", step=self._step, regions=_regions())
        if self._draws is not None and self._draws.watching:
            self._write("draws", modules=self._draws.stop())
        if self._step >= self._job.options.steps:
            self.finish("steps")
            raise StepsDone

    @torch.no_grad()
    def _write_gradients(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        number = self._optimizers.index(optimizer)
        trained = _trained(optimizer)
        known = self._parameters.get(number)
        if known is None or [*map(id, known)] != [*map(id, trained)]:
            self._parameters[number] = trained
            self._write("names", optimizer=number, names=parameter_names(trained))
        norms = [None if each.grad is None else _norm(each.grad) for each in trained]
        values = [None if each is None else float(each) for each in norms]
        total = sum(each * each for each in values if each is not None) ** 0.5
        self._write("gradients", step=self._step + 1, optimizer=number, total=total, norms=values)

    @torch.no_grad()
    def _write_weights(self) -> None:
        trained = list({id(each): each for group in self._parameters.values() for each in group}.values())
        weights: list[dict[str, Any]] = []
        missing, offset = None, 0
        try:
            with self._job.weights.open("wb") as file:
                for name, each in zip(parameter_names(trained), trained, strict=True):
                    values = _numbers(each)
                    num_bytes = values.numel() * values.element_size()
                    if num_bytes:
                        file.write((ctypes.c_char * num_bytes).from_address(values.data_ptr()))
                    dtype = str(values.dtype).removeprefix("torch.")
                    weights.append({"name": name, "dtype": dtype, "count": values.numel(), "offset": offset})
                    offset += num_bytes
        except OSError as error:  # the disk is full
            weights, missing = [], str(error)
        self._write("weights", weights=weights, missing=missing)


class Draws:
    """The modules that draw random numbers in training calls: the innermost ones, in a model's first step."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._open: list[list[Any]] = []  # for each running call: the generators' states, and whether a part drew
        self._found: dict[str, None] = {}

    @property
    def watching(self) -> bool:
        """Return whether any module is watched."""
        return bool(self._handles)

    def watch(self, modules: Iterable[nn.Module], trained: Sequence[Tensor]) -> None:
        """Watch the calls of all modules of the models that hold these parameters."""
        ids = {id(each) for each in trained}
        for outer in modules:
            parts = list(outer.modules())
            compiled = any(type(each).__name__ == "OptimizedModule" or each._compiled_call_impl for each in parts)
            scripted = any(isinstance(each, torch.jit.ScriptModule) for each in parts)
            if compiled or scripted or not any(id(each) in ids for each in outer.parameters()):
                continue
            for each in parts:
                if not any(getattr(hook, "__self__", None) is self for hook in each._forward_pre_hooks.values()):
                    self._handles.append(each.register_forward_pre_hook(self._before))
                    self._handles.append(each.register_forward_hook(self._after, always_call=True))

    def stop(self) -> list[str]:
        """Stop watching; return the classes of modules that drew."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return list(self._found)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # a compiler folds this hook away
            return
        self._open.append([_generators(), False])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open:
            return
        states, inner = self._open.pop()
        drew = any(not torch.equal(*pair) for pair in zip(states, _generators(), strict=True))
        if drew and not inner and module.training and torch.is_grad_enabled():
            self._found[type(module).__name__] = None
        if drew and self._open:
            self._open[-1][1] = True


def living_modules() -> list[nn.Module]:
    """Return every living outermost module, the largest first."""
    alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    inner = {id(child) for each in alive for child in each._modules.values()}
    outer = [each for each in alive if id(each) not in inner]
    return sorted(outer, key=lambda each: -sum(1 for _ in each.modules()))


def parameter_names(parameters: Sequence[Tensor]) -> list[str]:
    """Return the parameters' names in their modules; equal names in two models get the model's class in front."""
    wanted = {id(each) for each in parameters}
    found: dict[int, tuple[str, str]] = {}
    for module in living_modules():
        for name, held in module.named_parameters():
            if id(held) in wanted:
                found.setdefault(id(held), (type(module).__name__, name.replace("_orig_mod.", "")))
    names = [name for _, name in found.values()]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    named = []
    for number, each in enumerate(parameters):
        model, name = found.get(id(each), ("", f"parameter {number}"))
        named.append(f"{model}: {name}" if name in twice else name)
    return named


def drop_nothing(outer: nn.Module) -> int:
    """Set every dropout in a model to zero, in its modules and in the configurations they read; return the count."""
    count = 0
    for module in outer.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in list(vars(module).items()):
            if _is_probability(value) and ("drop" in name.lower() or (is_dropout and name == "p")):
                setattr(module, name, 0.0)
                count += 1
        count += _drop_nothing_in(vars(module).get("config"))
    return count


def _drop_nothing_in(config: Any) -> int:
    count = 0
    for name, value in list(getattr(config, "__dict__", {}).items()):
        if _is_probability(value) and "drop" in name.lower():
            setattr(config, name, 0.0)
            count += 1
        elif name.endswith("_config"):
            count += _drop_nothing_in(value)
    return count


def _is_probability(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1


@torch.no_grad()
def move_last_bit(weight: Tensor, seed: int) -> None:
    """Move each number of a weight, in place, to the next one that its dtype has, up or down at random."""
    local = _local(weight.data)
    if not local.is_floating_point() or not local.numel():
        return
    generator = torch.Generator().manual_seed(seed)  # a new generator: the script's random numbers stay the same
    up = torch.randint(0, 2, local.shape, generator=generator, dtype=torch.bool)
    limit = torch.where(up, torch.inf, -torch.inf).to(local.device, local.dtype)
    try:
        local.copy_(torch.nextafter(local, limit))
    except (NotImplementedError, RuntimeError):  # a dtype or a device that has no such operator
        local.mul_(1 + torch.where(up, 1, -1).to(local.device) * torch.finfo(local.dtype).eps)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _norm(gradient: Tensor) -> Tensor:
    values = _local(gradient.detach())
    if values.is_sparse:
        values = values.coalesce().values()
    double = values.device.type != "mps"  # MPS has no float64
    return torch.linalg.vector_norm(values, dtype=torch.float64 if double and not values.is_complex() else None)


def _numbers(weight: Tensor) -> Tensor:
    """Return a weight's numbers on the CPU, contiguous, as float32, or as float64 if the weight is of that dtype."""
    values = _local(weight.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return values.to("cpu", dtype).contiguous()


def _generators() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _ledger() -> Any:
    """Return the ledger of regions' records; None before something was compiled."""
    module = sys.modules.get("deepytorch.compiler.report")
    return None if module is None else module.LEDGER


def _regions() -> list[tuple[str, int, int]]:
    regions = [] if (ledger := _ledger()) is None else ledger.report().regions
    return [(each.name, each.steps_packed, each.steps_padded) for each in regions]


def _is_ours(roots: Sequence[Any]) -> bool:
    """Return whether a backward is not the script's: traced by a compiler, or part of a proof of ours."""
    if TracingContext.try_get() is not None or detect_fake_mode(list(roots)) is not None:
        return True
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _PROOFS:
            return True
        frame = frame.f_back
    return False
