"""Keys and values that the rows of a batch begin with, as prefix tuning gives them to a model in its cache.

A padded call's cache holds (rows, heads, prefix, head_dim) for each layer, to which the layer appends the keys of the
batch. The cache of a packed batch lays each row's prefix before the row's tokens instead.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepytorch.passes.ops.pack import pack_rows

NAMES = ("past_key_values", "cache")  # of the argument; the second since transformers 5.18


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The keys and values that a call is given.

    name: of the argument. cache: the script's cache, a `DynamicCache` of transformers. length: the number of keys that
    each row begins with, the same in all layers. layers: the cache's layers as the call found them, each with keys
    (rows, heads, length, head_dim) and values.
    """

    name: str
    cache: Any
    length: int
    layers: tuple[Any, ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CachedPrefix | None:
        """Return the prefix among a call's arguments; None if there is none that can be packed.

        Packed are prefixes that are trained, or that come with labels: generation, whose cache grows by a key with each
        call, has neither.
        """
        caches = [(name, given[name]) for name in NAMES if given.get(name) is not None]
        if len(caches) != 1 or type(caches[0][1]).__name__ != "DynamicCache":
            return None
        [(name, cache)] = caches
        layers = list(cache.layers)
        plain = all(type(each).__name__ == "DynamicLayer" and each.is_initialized for each in layers)
        if not layers or not plain or getattr(cache, "offloading", False):
            return None
        keys = [each.keys for each in layers]
        if any(each.dim() != 4 or (each.shape[0], each.shape[2]) != keys[0].shape[::2] for each in keys):
            return None
        is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in keys)
        length = keys[0].shape[2]
        if not length or not (is_trained or given.get("labels") is not None):
            return None
        return cls(name, cache, length, tuple(map(copy.copy, layers)))

    @property
    def tensors(self) -> list[Tensor]:
        """Return the keys and values of all layers."""
        return [each for layer in self.layers for each in (layer.keys, layer.values)]

    def renewed(self) -> Any:
        """Return a cache that begins as the script's did, for another run: each run appends to its cache."""
        return self._with_layers(map(copy.copy, self.layers))

    def like(self, rows: int, generator: torch.Generator) -> Any:
        """Return a cache of random numbers for `rows` rows, with gradients if they are on."""

        def drawn(tensor: Tensor) -> Tensor:
            made = torch.randn(rows, *tensor.shape[1:], generator=generator).to(tensor).detach()
            return made.requires_grad_(torch.is_grad_enabled())

        layers = list(map(copy.copy, self.layers))
        for each in layers:
            each.keys, each.values = drawn(each.keys), drawn(each.values)
        return self._with_layers(layers)

    def _with_layers(self, layers: Iterable[Any]) -> Any:
        made = copy.copy(self.cache)
        made.layers = list(layers)
        return made

    def packed(self, places: Tensor, num_positions: int) -> Any:
        """Return the cache of a packed batch.

        places: (keys,) int64, the place of each key among rows x (prefix and positions). num_positions: of prefix and
        positions.
        """
        rows = self.layers[0].keys.shape[0]
        row, column = places // num_positions, places % num_positions
        token = torch.arange(places.shape[0], device=places.device) - (row + 1) * self.length
        order = torch.where(column < self.length, row * self.length + column, rows * self.length + token)
        return self._with_layers(_packed_layer(each, order) for each in self.layers)


def renewed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call for another run, with a cache that begins as the given one does now."""
    prefix = CachedPrefix.of(given)
    return dict(given) if prefix is None else {**given, prefix.name: prefix.renewed()}


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
    return type(f"Packed{kind.__name__}", (_PackedLayer, kind), {})


@dataclass(eq=False)
class PackedPrefix:
    """The prefix of a packed batch.

    prefix: as the script has given it. cache: what the model gets. side: a `Side`, the keys of all rows. again: the
    cache of a padded run of the same call, if there was one.
    """

    prefix: CachedPrefix
    cache: Any
    side: Any
    again: Any = None

    def arguments_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's arguments for a padded run of it, with a cache of its own, which is kept as `again`."""
        self.again, given = self.prefix.renewed(), self.prefix.cache
        return (
            [self.again if each is given else each for each in args],
            {name: self.again if each is given else each for name, each in kwargs.items()},
        )

    def append_to_script(self, show: Callable[..., Tensor]) -> None:
        """Append the batch's keys and values to the script's cache, as the padded run would.

        show: as for `PackedBatch.outputs`.
        """

        def find(number: int, part: str) -> Callable[[Any], Any]:
            return lambda outputs: getattr(self.again.layers[number], part)

        name = self.prefix.name
        for number, (layer, packed) in enumerate(zip(self.prefix.cache.layers, self.cache.layers, strict=True)):
            if packed.is_updated:
                layer.keys = show(packed.keys, self.side, 2, name, find(number, "keys"))
                layer.values = show(packed.values, self.side, 2, name, find(number, "values"))
