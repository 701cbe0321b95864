"""The errors that deepytorch raises. Each message says what was found, what was expected and what to do."""

from __future__ import annotations


class DeepytorchError(Exception):
    """Base of every error that deepytorch raises on purpose."""


class ConfigError(DeepytorchError, ValueError):
    """An option, a mode or an environment variable has a value that is not accepted."""


class DataError(DeepytorchError, ValueError):
    """A data file cannot be read or does not have the expected layout."""


class ParityError(DeepytorchError):
    """Two runs that must agree (losses, gradients) do not."""


class CommandError(DeepytorchError):
    """A command that is to be run cannot be found or started."""


class ScriptError(DeepytorchError):
    """A script that is to be checked fails by itself, or trains nothing."""


class DeferredError(DeepytorchError, RuntimeError):
    """A deferred output can no longer be computed, because what it is computed from has changed."""


class BuildError(DeepytorchError, RuntimeError):
    """Native code cannot be compiled or loaded here, or is not as it has to be."""


class CommunicationError(DeepytorchError, RuntimeError):
    """Ranks of a group cannot come together: one is silent, or they describe themselves differently."""


class GradientError(DeepytorchError, RuntimeError):
    """Gradients cannot be reduced as DistributedDataParallel would: ranks differ, or some never came."""
