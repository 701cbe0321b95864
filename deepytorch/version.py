"""The version, in a module of its own so that every layer may read it (it is part of the compile caches' keys)."""

__version__ = "0.1.0.dev0"
