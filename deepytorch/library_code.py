"""The check that a model is a library's code alone, whose modules are known to look at other tokens by attention only.

A script's own code may join tokens any number of positions apart: a class of its own, or a function that it has set on
an instance or put into a library's class or module. Functions are identified by the module whose globals they run in,
since `functools.wraps` gives a wrapper the name and the `__module__` of the wrapped function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "megatron")
# Libraries that set functions on others' modules, which call the original; by which transformers loads weights; or
# whose functions stand beside Megatron-LM's.
AROUND = (
    "accelerate", "apex", "deepspeed", "deepytorch", "huggingface_hub", "safetensors", "torchaudio", "torchvision",
    "transformer_engine", "typing_extensions",
)  # fmt: skip
# The same of single modules, in packages that put attention of their own into models from others.
MODULES_AROUND = ("llamafactory.model.model_utils.checkpointing",)


def is_of_libraries(model: nn.Module) -> bool:
    """Return whether the classes of all modules in `model`, and the functions on these, are libraries' code."""
    modules = list(model.modules())
    kinds = {kind for each in modules for kind in type(each).__mro__ if issubclass(kind, nn.Module)}
    if not all(_package(kind.__module__) in LIBRARIES for kind in kinds):
        return False
    seen: set[int] = set()
    set_on_instances = (each for module in modules for each in (*functions_on(module), module._compiled_call_impl))
    in_classes = (each for kind in kinds for each in vars(kind).values())
    homes = {kind.__module__ for kind in kinds if kind.__module__ in sys.modules}
    beside_classes = (each for home in homes for each in vars(sys.modules[home]).values() if type(each) is FunctionType)
    return all(_is_librarys(each, seen) for every in (set_on_instances, in_classes, beside_classes) for each in every)


def functions_on(module: nn.Module) -> list[Any]:
    """Return the functions that were set on an instance, and not in its class, and that its forward may run."""
    found = [
        each
        for name, each in vars(module).items()
        if name not in _OF_EVERY_MODULE | _OF_GENERATION and callable(each) and not isinstance(each, nn.Module)
    ]
    hook = vars(module).get("_hf_hook")  # Accelerate's forward calls it, and a script may have written it
    return found if hook is None else [*found, *map(type, getattr(hook, "hooks", [hook]))]


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
# What `generate` runs, and no forward. PEFT's leaves it on the instance after the first call.
_OF_GENERATION = frozenset(("prepare_inputs_for_generation",))


def _is_librarys(value: Any, seen: set[int]) -> bool:
    """Return whether a function, with all its parts, is a library's; True for a value that is no function."""
    if id(value) in seen or isinstance(value, nn.Module):  # modules are checked by themselves
        return True
    seen.add(id(value))
    home, parts = _home_and_parts(value)
    if home is not None and _package(home) == "deepytorch":
        return True
    known = home is None or home in MODULES_AROUND or _package(home) in (*LIBRARIES, *AROUND, *sys.stdlib_module_names)
    return known and all(_is_librarys(each, seen) for each in parts)


def _home_and_parts(value: Any) -> tuple[str | None, Iterable[Any]]:
    """Return the module in which a function was written, None if its parts decide, and the parts that it may run."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return None, (value.__func__,)
    if isinstance(value, property):
        return None, (value.fget,)
    if isinstance(value, functools.cached_property | functools.partialmethod):
        return None, (value.func,)
    if isinstance(value, functools.partial):
        return None, (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        return value.__globals__.get("__name__"), map(_content, value.__closure__ or ())
    if isinstance(value, type):
        return value.__module__, ()
    if not callable(value):
        return None, ()
    if not hasattr(value, "__dict__"):  # a function of C
        return getattr(value, "__module__", None), ()
    return type(value).__module__, vars(value).values()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def _package(home: str) -> str:
    return home.partition(".")[0]
