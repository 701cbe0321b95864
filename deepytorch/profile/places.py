"""The functions of deepytorch's and of torch's around which a profile puts its scopes, and what each is counted as.

They are replaced only in processes that `deepytorch profile` starts: no other run has anything of this in its way. In a
trace the names show the two trips of docs/how-it-works.md: of the first call (trace, capture, passes, compile) and of a
settled step (read the batch, pack, run, unpack, gradients, collectives).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from wrapt import when_imported

from deepytorch.patches import replace
from deepytorch.profile.clock import Scope
from deepytorch.profile.records import COMMUNICATION, COMPILE, COMPUTE, HOST, LOADER, OPTIMIZER, WAITED, Part
from deepytorch.torch_internals import BUFFERS_OF_DDP, COLLECTIVES, DataLoaderIterator, wrap_engine_run_backward

if TYPE_CHECKING:
    from deepytorch.profile.recorder import Recorder

OURS = Part(HOST, "deepytorch's own work")
_MODEL = Part(HOST, "the model outside of its regions")
_AGAIN = Part(COMPUTE, "once more padded, as the script looks at pads")
_TRACE = Part(COMPILE, "trace, rewrite and compile")
_GRADIENTS = Part(HOST, "gradients into buckets")
_MEANWHILE = " until it is compiled"

# Dotted names, the name in a trace (empty: none), the part, and whether a step with such a call is no settled one.
_SIMPLE: tuple[tuple[str, str, str, Part, bool], ...] = (
    ("deepytorch.compiler.dynamo.trace_gate", "TraceGate.__call__", "trace", _TRACE, False),
    ("deepytorch.compiler.backend", "_analysed", "analyse", _TRACE, True),
    ("deepytorch.compiler.backend", "_lower_whole", "analyse", _TRACE, True),
    ("deepytorch.compiler.backend", "capture", "capture", _TRACE, True),
    ("deepytorch.compiler.backend", "run_passes", "passes", _TRACE, True),
    ("deepytorch.compiler.code.lower_region", "RegionLowering.compile", "compile", _TRACE, True),
    ("deepytorch.compiler.code.compiled_step", "compile_nested", "compile", _TRACE, True),
    ("deepytorch.compiler.code.compiled_step", "prepare_nested", "compile", _TRACE, True),
    ("deepytorch.compiler.step.guard", "Guard.difference", "compare with eager", _TRACE, True),
    ("deepytorch.integrations.model_entry", "ModelEntry._ask", "prove at model entry", _TRACE, True),
    ("deepytorch.first_steps", "FirstSteps.call", "first steps", Part(COMPUTE, "forward, first steps in eager"), True),
    ("deepytorch.handles", "Handle.without_gradients", "without gradients",
     Part(COMPUTE, "calls without gradients"), False),
    ("deepytorch.compiler.step.packing", "Packing.read", "read the batch", OURS, False),
    ("deepytorch.compiler.step.packing", "Packing.call", "pack", OURS, False),
    ("deepytorch.compiler.step.step_outputs", "StepOutputs.packed", "unpack", OURS, False),
    ("deepytorch.compiler.step.outputs.replay", "Replay._run", "once more padded", _AGAIN, False),
    ("deepytorch.comm.gradients.reducer", "GradientReducer.arrive", "gradients into buckets", _GRADIENTS, False),
    ("deepytorch.comm.gradients.reducer", "GradientReducer._end", "end of the backward", _GRADIENTS, False),
    ("deepytorch.comm.gradients.replanning", "Replanner.next_plan", "plan buckets", _GRADIENTS, True),
    ("torch.nn.utils", "clip_grad_norm_", "clip gradients", Part(OPTIMIZER, "clip gradients"), False),
    ("torch.optim.optimizer", "Optimizer.zero_grad", "", Part(OPTIMIZER, "zero_grad"), False),
)  # fmt: skip


class Places:
    """The scopes of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls: list[Scope] = []  # of regions and model entries under way: the scopes of their computation
        self._backwards: weakref.WeakKeyDictionary[Any, Scope] = weakref.WeakKeyDictionary()  # by `SecondBackward`

    def attach(self) -> None:
        """Put the scopes there: at once around torch's, and around ours when their modules are imported."""
        for module, name, shown, part, unsettles in _SIMPLE:
            self._around(module, name, self._simple(Scope(part), shown, unsettles))
        self._around("deepytorch.handles", "Handle.__call__", self._model_call)
        self._around("deepytorch.compiler.step.region", "Region.__call__", self._region_call)
        self._around("deepytorch.compiler.step.region", "Region._run_eager", self._computation("run in eager"))
        self._around("deepytorch.compiler.step.region", "Region._run_padded", self._computation("run padded"))
        self._around("deepytorch.compiler.step.region", "Region._run_tokens", self._profiled_call)
        self._around("deepytorch.compiler.step.packing", "PackedCall.run", self._computation("run packed"))
        self._around("deepytorch.compiler.step.second_backward", "SecondBackward.run", self._second_run)
        self._around("deepytorch.compiler.step.second_backward", "_Replacement._run", self._region_backward)
        self._around("deepytorch.integrations.model_entry", "ModelEntry.call", self._entry_call)
        loading = self._simple(Scope(Part(LOADER, "next batch")), "data loader", False)
        self._put(DataLoaderIterator, "__next__", loading)
        self._put(torch.utils.data.DataLoader, "__iter__", self._loader)
        wrap_engine_run_backward(self._backward)
        if torch.distributed.is_available():
            waiting = self._simple(Scope(Part(COMMUNICATION, WAITED)), "collective", False)
            self._put(torch.distributed.Work, "wait", waiting)
            for name in COLLECTIVES:  # a call that is not asynchronous may do its work in here
                if hasattr(torch.distributed.ProcessGroup, name):
                    self._put(torch.distributed.ProcessGroup, name, waiting)
            ddp = torch.nn.parallel.DistributedDataParallel
            if hasattr(ddp, BUFFERS_OF_DDP):
                self._put(ddp, BUFFERS_OF_DDP, waiting)

    def _around(self, module: str, name: str, make: Callable[[Any], Any]) -> None:
        *owners, last = name.split(".")
        when_imported(module)(lambda found: self._put(reduce(getattr, owners, found), last, make))

    @staticmethod
    def _put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        replace(owner, name, make, "time it (deepytorch profile)", always=True)

    def _simple(self, scope: Scope, shown: str, unsettles: bool) -> Callable[[Any], Any]:
        recorder = self._recorder

        def make(original: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if not recorder.is_here():
                    return original(*args, **kwargs)
                recorder.is_settled = recorder.is_settled and not unsettles
                with recorder.inside(scope, shown):
                    return original(*args, **kwargs)

            return timed

        return make

    # ------------------------------------------------------------------ the model and its regions

    def _model_call(self, original: Any) -> Any:
        recorder = self._recorder

        def call(handle: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.is_here():
                return original(handle, module, *args, **kwargs)
            known = recorder.positions
            with recorder.inside(Scope(_MODEL), "model"):
                outputs = original(handle, module, *args, **kwargs)
            mask = kwargs.get("attention_mask")  # looked at where no region did, and no device has to be waited for
            if isinstance(mask, torch.Tensor) and mask.ndim == 2 and recorder.positions == known and mask.is_cpu:
                recorder.saw_batch(mask.numel(), mask.numel() - int(mask.count_nonzero()), packed=False)
            return outputs

        return call

    def _region_call(self, original: Any) -> Any:
        def call(region: Any, *inputs: Any) -> Any:
            return self._counted(region._record, OURS, lambda: original(region, *inputs))

        return call

    def _entry_call(self, original: Any) -> Any:
        def call(entry: Any, run: Any, args: Any, kwargs: Any) -> Any:
            record = entry._records[torch.is_grad_enabled()]
            computed = self._computation("run at model entry")(run)
            return self._counted(record, OURS, lambda: original(entry, computed, args, kwargs))

        return call

    def _counted(self, record: Any, part: Part, call: Callable[[], Any]) -> Any:
        """Run a call of a region, and find out from its record what it did."""
        recorder = self._recorder
        if not recorder.is_here():
            return call()
        before = (record.tokens_padded, record.tokens_real, record.steps_packed, record.steps_meanwhile)
        self._calls.append(Scope(Part(COMPUTE, "forward", record.name, record.route)))
        try:
            with recorder.inside(Scope(part), record.name):
                return call()
        finally:
            after = (record.tokens_padded, record.tokens_real, record.steps_packed, record.steps_meanwhile)
            positions, tokens, packed, meanwhile = (new - old for new, old in zip(after, before, strict=True))
            form = _form(record) + _MEANWHILE * bool(meanwhile)
            if meanwhile or record.route == "profiled" or record.forms_untried:
                recorder.is_settled = False
            if positions:
                recorder.saw_batch(positions, positions - tokens, packed=bool(packed))
            scope = self._calls.pop()
            scope.part = scope.part._replace(form=form)

    def _computation(self, shown: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def compute(*args: Any, **kwargs: Any) -> Any:
                if not self._calls or not self._recorder.is_here():
                    return original(*args, **kwargs)
                with self._recorder.inside(self._calls[-1], shown):
                    return original(*args, **kwargs)

            return compute

        return make

    def _profiled_call(self, original: Any) -> Any:
        profiled = self._computation("run in eager")(original)

        def run(region: Any, packing: Any, inputs: Any, facts: Any, chosen: Any, started: float) -> Any:
            function = profiled if chosen.value == "profiled" else original
            return function(region, packing, inputs, facts, chosen, started)

        return run

    def _second_run(self, original: Any) -> Any:
        def run(second: Any, *args: Any, **kwargs: Any) -> Any:
            if self._calls and self._recorder.is_here():
                self._backwards[second] = self._calls[-1]
            return original(second, *args, **kwargs)

        return run

    # ------------------------------------------------------------------ backwards, batches

    def _region_backward(self, original: Any) -> Any:
        def run(replacement: Any, *args: Any) -> Any:
            forward = self._backwards.get(replacement._second)
            if forward is None or not self._recorder.is_here():
                return original(replacement, *args)
            part = forward.part._replace(what="backward")
            with self._recorder.inside(Scope(part), f"backward of {part.region}"):
                return original(replacement, *args)

        return run

    def _backward(self, original: Any) -> Any:
        timed = self._simple(Scope(Part(COMPUTE, "backward outside of regions")), "backward", False)(original)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._recorder.backwards += 1
            return timed(*args, **kwargs)

        return run

    def _loader(self, original: Any) -> Any:
        timed = self._simple(Scope(Part(LOADER, "start of an epoch")), "data loader", False)(original)

        def iterate(loader: Any) -> Any:
            self._recorder.rank.workers = max(self._recorder.rank.workers or 0, loader.num_workers)
            return timed(loader)

        return iterate


def _form(record: Any) -> str:
    """Return the form in which a region ran its last call, in words."""
    if record.route == "padded":
        return "padded" if record.outcome == "packed" else "compiled"
    return str(record.route) or "eager"
