"""Keys and values that the rows of a batch begin with, as prefix tuning gives them to a model in its cache.

A padded call's cache holds (rows, heads, prefix, head_dim) for each layer, to which the layer appends the keys of the
batch. The cache of a packed batch lays each row's prefix before the row's tokens instead.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepytorch.passes.ops.pack import pack_rows

if TYPE_CHECKING:
    from deepytorch.integrations.packed_batch import Side

NAMES = ("past_key_values", "cache")  # of the argument; the second since transformers 5.18


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The keys and values that a call is given in a `DynamicCache` of transformers.

    name: of the argument. empty: a cache like the script's, without layers. length: the number of keys that each row
    begins with, the same in all layers. layers: the cache's layers as the call found them, each with keys (rows, heads,
    length, head_dim) and values. script: the script's cache, which must not live on for what is computed later.
    """

    name: str
    empty: Any
    length: int
    layers: tuple[Any, ...]
    script: weakref.ref[Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CachedPrefix | None:
        """Return the prefix among a call's arguments; None if there is none that can be packed."""
        caches = [(name, given[name]) for name in NAMES if given.get(name) is not None]
        if len(caches) != 1 or type(caches[0][1]).__name__ != "DynamicCache":
            return None
        [(name, cache)] = caches
        layers = tuple(cache.layers)
        plain = all(type(each).__name__ == "DynamicLayer" and each.is_initialized for each in layers)
        if not layers or not plain or getattr(cache, "offloading", False):
            return None
        keys = [each.keys for each in layers]
        if any(each.dim() != 4 or (each.shape[0], each.shape[2]) != keys[0].shape[::2] for each in keys):
            return None
        if keys[0].shape[2] == 0:
            return None
        return cls(name, _with_layers(cache, ()), keys[0].shape[2], tuple(map(copy.copy, layers)), weakref.ref(cache))

    @property
    def tensors(self) -> list[Tensor]:
        """Return the keys and values of all layers."""
        return [each for layer in self.layers for each in (layer.keys, layer.values)]

    def renewed(self) -> Any:
        """Return a cache that begins as the script's did, for another run: each run appends to its cache."""
        return _with_layers(self.empty, map(copy.copy, self.layers))

    def like(self, rows: int, generator: torch.Generator) -> Any:
        """Return a cache of random numbers for `rows` rows, with gradients if they are on."""

        def drawn(tensor: Tensor) -> Tensor:
            made = torch.randn(rows, *tensor.shape[1:], generator=generator).to(tensor).detach()
            return made.requires_grad_(torch.is_grad_enabled())

        layers = list(map(copy.copy, self.layers))
        for each in layers:
            each.keys, each.values = drawn(each.keys), drawn(each.values)
        return _with_layers(self.empty, layers)

    def packed(self, places: Tensor, num_positions: int) -> Any:
        """Return the cache of a packed batch.

        places: (keys,) int64, the place of each key among rows x (prefix and positions). num_positions: of prefix and
        positions.
        """
        rows = self.layers[0].keys.shape[0]
        row, column = places // num_positions, places % num_positions
        token = torch.arange(places.shape[0], device=places.device) - (row + 1) * self.length
        order = torch.where(column < self.length, row * self.length + column, rows * self.length + token)
        return _with_layers(self.empty, (_packed_layer(each, order) for each in self.layers))


def is_wanted(given: Mapping[str, Any]) -> bool:
    """Return whether a call with cached keys is one of training or evaluation: they are trained, or there are labels.

    Generation, whose cache grows by a key with each call, has neither.
    """
    if given.get("labels") is not None:
        return True
    prefix = CachedPrefix.of(given) if torch.is_grad_enabled() else None
    return prefix is not None and any(each.requires_grad for each in prefix.tensors)


def renewed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call for another run, with a cache that begins as the given one does now."""
    prefix = CachedPrefix.of(given)
    return dict(given) if prefix is None else {**given, prefix.name: prefix.renewed()}


def _with_layers(cache: Any, layers: Iterable[Any]) -> Any:
    made = copy.copy(cache)
    made.layers = list(layers)
    return made


class _PackedLayer:
    """One layer of a packed batch's cache; `_layer_below` makes it a layer of transformers'.

    keys: (rows, heads, prefix, head_dim), from `update` on (1, heads, keys of all rows, head_dim); values likewise.
    order: (keys,) int64, the place of each key among the prefixes of all rows and, behind them, the tokens.
    """

    def __init__(self, keys: Tensor, values: Tensor, order: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.keys, self.values, self._order = keys, values, order
        self._length = keys.shape[2]
        self.is_updated = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the whole packed batch, given those of its tokens."""
        self.keys, self.values = self._joined(self.keys, key_states), self._joined(self.values, value_states)
        self.is_updated = True
        return self.keys, self.values

    def _joined(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        before = prefix.transpose(1, 2).flatten(0, 1)  # (rows * prefix, heads, head_dim)
        return pack_rows(torch.cat([before, tokens[0].transpose(0, 1)]), self._order).transpose(0, 1)[None]

    def get_seq_length(self) -> int:
        """Return the number of keys that each row begins with."""
        return self._length


def _packed_layer(layer: Any, order: Tensor) -> Any:
    kind: Any = type(layer)
    return _layer_below(kind)(layer.keys, layer.values, order)


@functools.cache
def _layer_below(kind: type) -> Any:
    """Return the class of a packed batch's layers below `kind`, the class of the script's: models ask for that."""
    return type(f"Packed{kind.__name__}", (_PackedLayer, kind), {"_layer_type": None})  # transformers lists the others


@dataclass(eq=False)
class PackedPrefix:
    """The prefix of a packed batch.

    prefix: as the script has given it. cache: what the model gets. side: the keys of all rows. again: the cache of a
    padded run of the same call, if there was one.
    """

    prefix: CachedPrefix
    cache: Any
    side: Side
    again: Any = None

    def without_script_cache(self, value: Any) -> Any:
        """Return an argument of the call; in place of the script's cache something that `with_own_cache` knows."""
        return _OWN_CACHE if value is not None and value is self.prefix.script() else value

    def with_own_cache(self, value: Any) -> Any:
        """Return an argument for a padded run of the call; a cache of its own is kept as `again`."""
        if value is not _OWN_CACHE:
            return value
        self.again = self.prefix.renewed()
        return self.again

    def append_to_script(self, show: Callable[..., Tensor]) -> None:
        """Append the batch's keys and values to the script's cache, as the padded run would.

        show: as for `PackedBatch.outputs`.
        """

        def find(number: int, part: str) -> Callable[[Any], Any]:
            return lambda outputs: getattr(self.again.layers[number], part)

        cache, name = self.prefix.script(), self.prefix.name
        assert cache is not None  # it is an argument of the call that runs
        for number, (layer, packed) in enumerate(zip(cache.layers, self.cache.layers, strict=True)):
            if packed.is_updated:
                layer.keys = show(packed.keys, self.side, 2, name, find(number, "keys"))
                layer.values = show(packed.values, self.side, 2, name, find(number, "values"))


_OWN_CACHE = object()
