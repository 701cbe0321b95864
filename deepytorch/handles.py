"""The handles of armed modules: each decides how a call of its module runs.

A training call runs in eager for the first steps (`FirstSteps`), then compiled, or packed at the model's entry. A call
without gradients may be packed at the entry.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from deepytorch.class_state import ClassState
from deepytorch.compiler.budget import BUDGET
from deepytorch.first_steps import FirstEntry, FirstSteps
from deepytorch.forward_only import ForwardOnly, may_have_padding
from deepytorch.library_code import is_of_libraries
from deepytorch.log import once
from deepytorch.parallel_modules import shares_weights
from deepytorch.training_calls import (
    RepeatedDraws,
    is_of_the_scripts,
    is_ours_to_run,
    is_traced,
    is_transformed,
    of_subclasses,
)

if TYPE_CHECKING:
    from deepytorch.compiler.outcome import Outcome
    from deepytorch.compiler.report import RegionRecord

# Handles of armed modules. A handle belongs to its module's call and dies with it: its `ModelEntry` holds the module.
HANDLES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
_DRAWS: weakref.WeakKeyDictionary[nn.Module, RepeatedDraws] = weakref.WeakKeyDictionary()  # of armed and probed modules
# Integrations add to these two. ENTRIES: make the `ModelEntry` of a module, if it can be packed there, given the least
# share of pads worth packing.
ENTRIES: list[Callable[[nn.Module, float], ModelEntry | None]] = []
BEFORE_TRACES: list[Callable[[nn.Module, Mapping[str, Any]], None]] = []  # prepare a module for its first such call


class ModelEntry(FirstEntry, Protocol):
    """The packing at a module's entry, through which its training calls go if no graph of it is packed."""

    @property
    def asked(self) -> bool:
        """Return whether some kind of call was proved or declined."""
        ...

    @property
    def packs(self) -> bool:
        """Return whether some kind of call was proved."""
        ...

    def is_the_only_way_for(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether no graph of a call with these arguments could be packed, however Dynamo traces it."""
        ...

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RegionRecord:
        """Return the record of a training call with these arguments, without running it."""
        ...


class Handle:
    """One module that was armed.

    Args:
        module: The module.
        compiled: Runs its training calls, given the module and the arguments.
        entry: The packing at its entry, if it has one. It is used if Dynamo cuts the module into several graphs, or
            cannot analyse one. It is used at once if this is known ahead: with partitioned weights (`sharded`), and if
            no graph of the module can be packed.
        sharded: Whether weights are partitioned.
        first: Runs the calls before the module is compiled, see `first_steps`.
    """

    def __init__(
        self,
        module: nn.Module,
        compiled: Callable[..., Any],
        entry: ModelEntry | None = None,
        sharded: bool = False,
        first: FirstSteps | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.compiled, self.entry = compiled, entry
        self._outcomes: list[Outcome] = []  # of its graphs
        self._looked, self._packs_at_entry = False, sharded or packs_from_start(module, entry)
        self._first, self._begun, self._prepared = first, first is None, False
        self._classes, self._paused = ClassState(module), BUDGET.paused
        self._forward_only, self._sharded = ForwardOnly(waits=first is None), sharded

    def is_outdated(self) -> bool:
        """Return whether the script has changed a class of the model's since the module was armed.

        To be called at the begin of each call. After a change the module runs in eager from then on.
        """
        module = self._module()
        assert module is not None  # its call runs
        if self._paused != BUDGET.paused:  # after a pause: the module may have been traced with other parts
            self._classes.add(module)
            self._paused = BUDGET.paused
        if not self._classes.has_changed():
            return False
        if self._first is not None and not self._first.has_looked():  # nothing depends on the model's classes yet
            self._classes = ClassState(module)
            return False
        once(
            logging.INFO,
            "%s runs in eager from now on: one of its modules' classes has been changed since it was looked at",
            type(module).__name__,
        )
        self.restore()
        return True

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a training call."""
        known = None if self._first is None else self._first.entry
        if self._first is not None and not self._first.over():
            return self._first.call(module, args, kwargs)
        if known is not None:
            assert self._first is not None
            self._first.restore()
        if not self._begun:
            assert self._first is not None
            self.compiled, self.entry, self._begun = *self._first.then(), True
            if known is not None and self.entry is not None:  # its proofs hold on
                self.entry = cast("ModelEntry", known)  # of `first_entry_of`
            if shares_weights(module):  # ranks come here in steps of their own
                self.entry = None
            self._packs_at_entry = packs_from_start(module, self.entry)
        if self._first is not None:
            return self._first.timed(partial(self._compiled_call, module), args, kwargs)
        return self._compiled_call(module, *args, **kwargs)

    def without_gradients(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call without gradients, packed at entry if possible. Sharded weights stay with their framework."""
        if self._sharded:
            return module._call_impl(*args, **kwargs)
        entry = self.entry if self._begun or self._first is None else self._first.entry
        try:
            return self._forward_only.call(entry, module, args, kwargs)
        finally:
            if entry is self.entry and entry is not None and entry.replaces_calls and not self._packs_at_entry:
                entry.restore()  # training goes by graphs

    def _compiled_call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._prepared:
            self._prepared = True
            for prepare in BEFORE_TRACES:
                prepare(module, kwargs)
            if self.entry is not None and self.entry.is_the_only_way_for(kwargs) and is_of_libraries(module):
                outputs = self.entry.call(partial(self.compiled, module), args, kwargs)
                self._packs_at_entry = self.entry.packs
                return outputs
        if self._packs_at_entry:
            assert self.entry is not None
            return self.entry.call(partial(self.compiled, module), args, kwargs)
        if self._looked:
            return self.compiled(module, *args, **kwargs)
        from deepytorch.compiler.outcome import Outcome, outcomes

        paused = BUDGET.paused
        with outcomes() as found:
            outputs = self.compiled(module, *args, **kwargs)
        self._outcomes += found
        self._looked = Outcome.PUT_OFF not in found  # else some frames of the module are traced later
        self._packs_at_entry = self.entry is not None and needs_entry(module, self._outcomes)
        if self._first is not None and self._outcomes and set(self._outcomes) == {Outcome.PUT_OFF}:
            self._first.resume(self.entry, BUDGET.paused - paused)
        return outputs

    def restore(self) -> None:
        """Disarm the module, which is then as it was before."""
        module = self._module()
        if module is not None and handle_of(module) is self:
            del HANDLES[module]
            take_out(module)
            for each in (self.entry, self._first):
                if each is not None:
                    each.restore()


class FrozenHandle(Handle):
    """A model that nobody trains, such as a teacher or a reference: calls without gradients are packed at its entry.

    options: as for `optimize`.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any] | None) -> None:
        super().__init__(module, _as_it_is)
        self._options, self._asked = options, False
        self._forward_only = ForwardOnly(waits=_waits(options))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call with gradients, which go through the model to its inputs: in eager."""
        return module._call_impl(*args, **kwargs)

    def without_gradients(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a call without gradients, packed at entry if possible.

        In training mode it may draw, and all that the script draws later would be other numbers.
        """
        if module.training:
            return module._call_impl(*args, **kwargs)
        if not self._asked and may_have_padding(kwargs):
            self.entry, self._asked = first_entry_of(module, self._options), True
        return self._forward_only.call(self.entry, module, args, kwargs)


class Handles(Handle):
    """The handles of several modules, such as the blocks of a sharded model."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def restore(self) -> None:
        for handle in self._handles:
            handle.restore()


def _as_it_is(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _waits(options: dict[str, Any] | None) -> bool:
    from deepytorch.compiler.config import CompilerConfig

    return CompilerConfig.parse(None, options).waits


def armed_call(handle: Handle, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a call of an armed module."""
    trained = torch.is_grad_enabled()
    if is_traced() or is_transformed() or not (module.training or (not trained and may_have_padding(kwargs))):
        return module._call_impl(*args, **kwargs)  # under a transform a generator's state has no memory
    # An evaluation may well begin with a seed of its own each time; that says nothing of what training draws.
    draws = (_DRAWS.get(module) or draws_of(module)) if module.training else None
    with draws or contextlib.nullcontext():
        if handle_of(module) is not handle or not is_ours_to_run() or handle.is_outdated():
            return module._call_impl(*args, **kwargs)
        if draws is not None and draws.found:
            _tell_repeated(module)
            return module._call_impl(*args, **kwargs)
        if special := of_subclasses(args, kwargs):
            if any(map(is_of_the_scripts, special)):
                return module._call_impl(*args, **kwargs)
            # These may be deferred outputs of another step, or of another model.
            from deepytorch.compiler.step.outputs.deferred import plain_arguments

            args, kwargs = plain_arguments(args, kwargs)  # type: ignore[assignment]
        return (handle if trained else handle.without_gradients)(module, *args, **kwargs)


def draws_of(module: nn.Module) -> RepeatedDraws:
    """Return the watch over the random numbers that a module's calls draw."""
    found = _DRAWS.get(module)
    if found is None:
        first = next(module.parameters(), None)
        found = _DRAWS[module] = RepeatedDraws(torch.device("cpu") if first is None else first.device)
    return found


def _tell_repeated(module: nn.Module) -> None:
    once(
        logging.INFO,
        "%s runs in eager: the script has set a random generator back, so that calls are to draw the same numbers",
        type(module).__name__,
    )


def armed(model: nn.Module) -> bool:
    """Return whether some module in `model`, itself included, is compiled in place by us."""
    return any(module in HANDLES for module in model.modules())


def handle_of(module: nn.Module) -> Handle | None:
    """Return the handle of an armed module, or None."""
    found = HANDLES.get(module)
    return None if found is None else found()


def needs_entry(module: nn.Module, found: Sequence[Outcome]) -> bool:
    """Return whether a module is to be packed at entry, since Dynamo has not packed all of it in one graph.

    That is: Dynamo cut a call into several graphs, or found one that cannot be analysed. Packing one graph of several
    does not last: the next one looks at pads of the values that are handed on. A proof at entry uses rows of a dozen
    tokens, which do not show how far a model reaches. So the module must be a library's, whose code is known to reach
    by attention alone; a user's code may join tokens any number of positions apart.
    """
    from deepytorch.compiler.outcome import Outcome

    graphs = [each for each in found if each not in (Outcome.PUT_OFF, Outcome.UNTRACEABLE)]
    return (len(graphs) > 1 or Outcome.UNTRACEABLE in found) and is_of_libraries(module)


def packs_from_start(module: nn.Module, entry: ModelEntry | None) -> bool:
    """Return whether the module is packed at entry from the start, as its graphs cannot be packed anyway."""
    return entry is not None and entry.is_the_only_way and is_of_libraries(module)


def entry_of(module: nn.Module, options: dict[str, Any] | None) -> ModelEntry | None:
    """Return a new `ModelEntry` for a module; None if no integration knows it. options: as for `optimize`."""
    from deepytorch.compiler.config import CompilerConfig

    config = CompilerConfig.parse(None, options)
    if not config.unpad:
        return None
    return next((entry for make in ENTRIES if (entry := make(module, config.min_padding)) is not None), None)


def first_entry_of(module: nn.Module, options: dict[str, Any] | None) -> ModelEntry | None:
    """Return the `ModelEntry` for the steps before a module is traced; None unless it reaches by attention alone.

    None for weights that ranks share: each rank would ask in a step of its own, and then wait for the others.
    """
    return entry_of(module, options) if is_of_libraries(module) and not shares_weights(module) else None


def take_out(module: nn.Module) -> None:
    """Take away what a module's call runs in place of its `forward`."""
    module.__dict__.pop("_compiled_call_impl", None)


def restore(module: nn.Module) -> None:
    """Disarm a module, if it is armed."""
    handle = handle_of(module)
    if handle is not None:
        handle.restore()
