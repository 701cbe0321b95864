"""The packed batch: a padded batch of a Hugging Face model, packed into one row, and the unpacking of outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepytorch.compiler.host_copies import host_copy
from deepytorch.compiler.step.batch_facts import Refusal, count_true, cumulative, places_of
from deepytorch.compiler.step.outputs.tokens import Place, Tokens
from deepytorch.device_reads import send
from deepytorch.integrations import cached_prefix
from deepytorch.integrations.cached_prefix import CachedPrefix, PackedPrefix
from deepytorch.integrations.packed_attention import CACHED_KEYS, CannotPack, Rows, encode_mask
from deepytorch.passes.ops.pack import pack_rows, unpack_rows

IGNORE_INDEX = -100

BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")  # (rows, positions, ...)
BY_DECODER_TOKEN = ("decoder_input_ids", "decoder_inputs_embeds")
MASKS = ("attention_mask", "decoder_attention_mask")
READ = ("input_ids", "decoder_input_ids", "labels", *MASKS)  # the arguments whose values decide the packing
AS_GIVEN = ("num_items_in_batch", "use_cache", "return_dict", "output_hidden_states")
Find = Callable[[Any], Any]
Show = Callable[[Tensor, "Side", int, str, Find], Tensor]

OFF = ("output_attentions", "output_router_logits", *cached_prefix.NAMES, "logits_to_keep", "encoder_outputs")


@dataclass(frozen=True, eq=False)
class Side:
    """The tokens of one mask; an encoder-decoder has two sides.

    indices: (tokens,) int64, the place of each token among rows x positions.
    """

    rows: Rows
    indices: Tensor
    num_rows: int
    num_positions: int

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return self.indices.shape[0]

    def pack(self, padded: Tensor) -> Tensor:
        """Pack (rows, positions, ...) to (1, tokens, ...)."""
        return pack_rows(padded.reshape(self.num_rows * self.num_positions, *padded.shape[2:]), self.indices)[None]

    def unpack(self, packed: Tensor, dim: int = 1) -> Tensor:
        """Unpack (1, ..., tokens, ...), with tokens at `dim`, to (rows, ..., positions, ...), with zeros at pads."""
        tokens_first = packed[0].movedim(dim - 1, 0)
        flat = unpack_rows(tokens_first, self.indices, self.num_rows * self.num_positions)
        return flat.unflatten(0, (self.num_rows, self.num_positions)).movedim(1, dim)

    @functools.cached_property
    def place(self) -> Place:
        """Return the places of the tokens among rows and positions."""
        return Place((self.num_rows, self.num_positions), self.indices)

    def tokens(self, packed: Tensor) -> Tokens:
        """Return the `Tokens` of a packed tensor (1, tokens, ...), which stand for (rows, positions, ...)."""
        return Tokens.of(self.place, packed[0])


class RowKind(Enum):
    """The positions of a row at which tokens may stand. Values: the name of a violation."""

    ANY = "anywhere"
    CONTIGUOUS = "tokens with holes between them"
    PREFIX = "tokens after pads"

    def violations(self, real: Tensor) -> Tensor:
        """Return a tensor that is true where rows are of another kind. real: (rows, positions) bool."""
        if self is RowKind.PREFIX:
            return real[:, 1:] & ~real[:, :-1]
        if self is RowKind.CONTIGUOUS:
            return (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1
        return real.new_zeros(1)


@dataclass(frozen=True)
class Reading:
    """The reading of a batch by a model, found out once: see `model_entry`.

    Attributes:
        positions: Gives position_ids (rows, positions) from ids and mask, for a model that takes them and was not given
            any; None if it takes none.
        shifted: Whether the label of a position is compared with the logits of the position before.
        rows: The kind of rows that the model is proved for.
        two_sided: Whether the model is an encoder-decoder.
        decoder_ids: Makes the decoder's ids from labels.
        bounds: One more than the largest id, for each argument that holds ids.
        pad_id: The id of padding.
        pads_hold_pad_id: Whether the model is proved only for batches whose ids at pads are `pad_id`, by which a head
            may find a row's end.
        unsure: Whether labels belong to a head above, which may shift them or not.
    """

    positions: Callable[[Mapping[str, Any], Tensor], Tensor] | None
    shifted: bool
    rows: RowKind
    two_sided: bool
    decoder_ids: Callable[[Tensor], Tensor] | None
    bounds: Mapping[str, int]
    pad_id: int | None
    pads_hold_pad_id: bool
    unsure: bool


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One batch as the model gets it.

    main: the side of ids. decoder: an encoder-decoder's other side. prefix: the keys that each row begins with, if any.
    """

    arguments: dict[str, Any]
    main: Side
    decoder: Side | None
    prefix: PackedPrefix | None = None

    @property
    def padding(self) -> float:
        """Return the share of positions that are pads."""
        positions = sum(side.num_rows * side.num_positions for side in self.sides)
        return 1.0 - sum(side.num_tokens for side in self.sides) / positions

    def outputs(self, outputs: Any, show: Show) -> Any:
        """Return the model's outputs as the padded run would give them; a `ModelOutput` is changed in place.

        show: makes a script's tensor from a packed one, given the side and the dimension of its tokens, its name, and a
        function that finds it among the outputs of another run.
        """
        caches = {} if self.prefix is None else {id(self.prefix.cache): self.prefix.prefix.script()}
        translation = _Translation(lambda value, dim, name, find: self._shown(value, dim, name, find, show), caches)
        found = translation.of(outputs)
        if self.prefix is not None:
            self.prefix.append_to_script(show)
        return found

    def _shown(self, value: Tensor, dim: int, name: str, find: Find, show: Show) -> Tensor:
        for side in self.sides:
            if value.dim() > dim and value.shape[0] == 1 and value.shape[dim] == side.num_tokens:
                return show(value, side, dim, name, find)
        return value

    def profiled(self, outputs: Any, show: Show) -> Any:
        """Return the outputs of a padded run, made into a script's tensors by `show`, as `outputs` does."""

        def shown(value: Tensor, dim: int, name: str, find: Find) -> Tensor:
            if not value.is_floating_point() or value.dim() <= dim or (self.decoder is not None and name == "output"):
                return value
            side = self.main if self.decoder is None or name.startswith("encoder") else self.decoder
            for each in (side,) if self.prefix is None else (side, self.prefix.side):
                if (value.shape[0], value.shape[dim]) == (each.num_rows, each.num_positions):
                    return show(value, each, dim, name, find)
            return value

        return _Translation(shown, {}).of(outputs)

    @property
    def grids(self) -> tuple[Side, ...]:
        """Return the sides, and that of keys with the prefix of each row."""
        return self.sides if self.prefix is None else (*self.sides, self.prefix.side)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Return the side of ids, and that of decoder ids if there is one."""
        return (self.main,) if self.decoder is None else (self.main, self.decoder)


def zeros_at_pads(packed: Tensor, side: Side, dim: int, name: str, find: Find) -> Tensor:
    """Unpack a packed tensor with zeros at pads, for a proof, which compares real positions."""
    return side.unpack(packed, dim)


@dataclass(frozen=True)
class _Translation:
    """The translation of a model's outputs, tensor by tensor; key-value caches have positions in dimension 2.

    translate: of a tensor, given the dimension of its positions, its name, and a function that finds it among the
    outputs of another run. caches: by the id of a cache that the model was given, the one to return in its place.
    """

    translate: Callable[[Tensor, int, str, Find], Tensor]
    caches: Mapping[int, Any]

    def of(self, outputs: Any) -> Any:
        """Return all outputs; a `ModelOutput` is changed in place."""
        if isinstance(outputs, tuple):
            return self._one(outputs, "output", lambda outputs: outputs)
        for name in list(outputs):
            outputs[name] = self._one(outputs[name], name, _item(lambda outputs: outputs, name))
        return outputs

    def _one(self, value: Any, name: str, find: Find) -> Any:
        if id(value) in self.caches:
            return self.caches[id(value)]
        if isinstance(value, Tensor):
            return self.translate(value, 1, name, find) if value.dim() >= 2 else value
        if isinstance(value, tuple | list):
            return type(value)(self._one(each, name, _item(find, number)) for number, each in enumerate(value))
        if hasattr(value, "self_attention_cache"):
            self._cached(value.self_attention_cache, name, _part(find, "self_attention_cache"))
            self._cached(value.cross_attention_cache, name, _part(find, "cross_attention_cache"))
        elif hasattr(value, "layers"):
            self._cached(value, name, find)
        elif value is not None:
            raise CannotPack(f"{name} is of type {type(value).__name__}")
        return value

    def _cached(self, cache: Any, name: str, find: Find) -> None:
        for number, layer in enumerate(cache.layers):
            if type(layer).__name__ != "DynamicLayer":
                raise CannotPack(
                    f"the key-value cache has layers of type {type(layer).__name__}; use_cache=False does without"
                )
            if layer.is_initialized:
                found = _item(_part(find, "layers"), number)
                layer.keys = self.translate(layer.keys, 2, name, _part(found, "keys"))
                layer.values = self.translate(layer.values, 2, name, _part(found, "values"))


def _item(find: Find, key: Any) -> Find:
    return lambda outputs: find(outputs)[key]


def _part(find: Find, name: str) -> Find:
    return lambda outputs: getattr(find(outputs), name)


def pack_batch(given: Mapping[str, Any], reading: Reading, above: Tensor | None = None) -> PackedBatch | Refusal:
    """Pack the arguments of a call; return a `Refusal` if this batch cannot be packed or is not worth it.

    given: name -> argument of the model's forward. above: labels of a head above the model, which stays padded. This
    takes one synchronisation with the device. Raises `CannotPack` if the call lacks an argument that the reading needs.
    """
    decoder_ids = _decoder_ids(given, reading)
    prefix = CachedPrefix.of(given)
    unknown = unknown_argument(given) or _does_not_fit(given, decoder_ids, prefix)
    if unknown is not None:
        return Refusal(unknown)
    labels = given.get("labels")
    if labels is not None and reading.shifted:
        labels = _shifted(labels)
    device = given["attention_mask"].device
    held, held_above = _on_host(given, above) or (given, above)
    length = 0 if prefix is None else prefix.length
    tokens, found = _facts(held, held_above, reading, decoder_ids, length)
    if isinstance(found, Refusal):
        return found
    sides = [_side(real, lengths, device) for real, lengths in zip(tokens, found, strict=True)]
    main, last = sides[0], sides[-1]
    if decoder_ids is not None and main.num_tokens == last.num_tokens:  # the sides could not be told apart
        return Refusal("both sides have as many tokens")
    arguments = {name: given[name] for name in AS_GIVEN if given.get(name) is not None}
    arguments |= {name: main.pack(given[name]) for name in BY_TOKEN if given.get(name) is not None}
    arguments["attention_mask"] = encode_mask(main.rows, last.rows)
    if reading.positions is not None and "position_ids" not in arguments:
        arguments["position_ids"] = main.pack(send(reading.positions(held, tokens[0]) + length, device))
    if decoder_ids is not None:
        arguments["decoder_inputs_embeds" if decoder_ids.dim() == 3 else "decoder_input_ids"] = last.pack(decoder_ids)
        arguments["decoder_attention_mask"] = encode_mask(last.rows)
    if labels is not None:
        arguments["labels"] = packed = last.pack(labels)
        if reading.shifted:  # the model shifts the packed row once more
            arguments["labels"] = F.pad(packed, (1, 0), value=IGNORE_INDEX)[:, :-1]
    if prefix is None:
        return PackedBatch(arguments, main, None if decoder_ids is None else last)
    keys = _side(held["attention_mask"] != 0, [each + length for each in found[0]], device)
    cache = prefix.packed(keys.indices, keys.num_positions)
    arguments |= {prefix.name: cache, "attention_mask": encode_mask(keys.rows, main.rows), CACHED_KEYS: length}
    return PackedBatch(arguments, main, None, PackedPrefix(prefix, cache, keys))


def is_known(name: str) -> bool:
    """Return whether an argument of this name is known for every model, whatever its value."""
    return name in (*BY_TOKEN, *BY_DECODER_TOKEN, *MASKS, *AS_GIVEN, *OFF, "labels")


def unknown_argument(given: Mapping[str, Any]) -> str | None:
    """Return a reason not to pack for an unknown argument; None if all are known."""
    prefix = CachedPrefix.of(given)
    for name, value in given.items():
        if prefix is not None and name == prefix.name:
            continue
        if value is not None and (not is_known(name) or (name in OFF and _is_set(value))):
            return f"the argument {name} is given"
    if not isinstance(given.get("attention_mask"), Tensor):
        return "no attention mask is given"
    return None


def _does_not_fit(given: Mapping[str, Any], decoder_ids: Tensor | None, prefix: CachedPrefix | None) -> str | None:
    """Return why a batch cannot be packed by its shapes; None if it can."""
    mask = given["attention_mask"]
    if mask.dim() != 2:  # of floating numbers too, as PEFT's: those besides 0 and 1 are refused when they are read
        return "the attention mask is not one of 0 and 1 for each position"
    if prefix is not None:
        if decoder_ids is not None:
            return f"an encoder-decoder is given {prefix.name}"
        if prefix.layers[0].keys.shape[0] != mask.shape[0]:
            return f"{prefix.name} is of another number of rows"
        mask = mask[:, prefix.length :]
    if mask.shape[0] < 2:
        return "a batch of one row"
    grids = dict.fromkeys(BY_TOKEN, mask)
    grids |= dict.fromkeys(("labels", "decoder_attention_mask"), mask if decoder_ids is None else decoder_ids)
    for name, grid in grids.items():
        value = given.get(name)
        if value is not None and value.shape[:2] != grid.shape[:2]:
            return f"{name} is of shape {tuple(value.shape)}"
    return None


def _is_set(value: Any) -> bool:
    return not (isinstance(value, bool | int) and not value)  # an empty cache counts as set: it is to be filled


def _decoder_ids(given: Mapping[str, Any], reading: Reading) -> Tensor | None:
    """Return the decoder's input: ids, embeddings, or ids made from labels. None for a one-sided model."""
    if not reading.two_sided:
        return None
    for name in BY_DECODER_TOKEN:
        if given.get(name) is not None:
            return given[name]
    if given.get("labels") is None or reading.decoder_ids is None:
        raise CannotPack("neither ids nor labels are given to the decoder")
    return reading.decoder_ids(given["labels"])


def _on_host(given: Mapping[str, Any], above: Tensor | None) -> tuple[dict[str, Any], Tensor | None] | None:
    """Return the arguments whose values decide the packing, and `above`, on the host; None if not known there."""
    held = dict(given)
    for name in READ:
        value = given.get(name)
        if isinstance(value, Tensor):
            held[name] = host_copy(value)
            if held[name] is None:
                return None
    if above is None:
        return held, None
    known = host_copy(above)
    return None if known is None else (held, known)


def _shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


def _facts(
    given: Mapping[str, Any], above: Tensor | None, reading: Reading, decoder_ids: Tensor | None, prefix: int
) -> tuple[list[Tensor], list[list[int]] | Refusal]:
    """Return the tokens of each side, (rows, positions) bool, and their number in each row, or a refusal.

    prefix: the number of keys that each row begins with, for which the mask has columns before those of the batch.
    """
    masks, labels = [given["attention_mask"][:, prefix:]], given.get("labels")
    if decoder_ids is not None:
        decoder_mask = given.get("decoder_attention_mask")
        if decoder_mask is None:
            decoder_mask = torch.ones(decoder_ids.shape[:2], dtype=torch.int64, device=masks[0].device)
        masks.append(decoder_mask)
    if labels is not None and reading.shifted:
        labels = _shifted(labels)
    tokens = [each != 0 for each in masks]
    hidden = given["attention_mask"][:, :prefix] != 1
    checks = [("the mask hides cached keys", hidden)] if prefix else []
    return tokens, _lengths(masks, tokens, given, labels, above, reading, checks)


def _lengths(
    masks: list[Tensor],
    tokens: list[Tensor],
    given: Mapping[str, Any],
    labels: Tensor | None,
    above: Tensor | None,
    reading: Reading,
    checks: list[tuple[str, Tensor]],
) -> list[list[int]] | Refusal:
    """Return the number of tokens of each row, for each side, or a refusal.

    checks: reasons to refuse, each with a tensor that is true where it holds. More are added.
    """
    for mask, real in zip(masks, tokens, strict=True):
        checks.append(("a mask holds numbers besides 0 and 1", real & (mask != 1)))
        if reading.rows is not RowKind.ANY:
            checks.append((f"{reading.rows.value}, which the model was not proved for", reading.rows.violations(real)))
    if above is not None and above.shape == tokens[-1].shape:  # compared with its position, or with the one before
        counted = above != IGNORE_INDEX
        seen = counted | F.pad(counted, (0, 1))[:, 1:]
        checks.append(("a label at a padded position is not ignored", seen & ~tokens[-1]))
    ids = given.get("input_ids")
    if reading.pads_hold_pad_id and ids is not None:
        checks.append(("an id at a padded position is not the padding's", (ids != reading.pad_id) & ~tokens[0]))
    if labels is not None:
        counted, real = labels != IGNORE_INDEX, tokens[-1]
        checks.append(("a label at a padded position is not ignored", counted & ~real))
        if reading.shifted:  # the packed row has no place for the label of its last token's prediction
            is_last = real[-1] & (real[-1].flip(0).cumsum(0).flip(0) == 1)
            checks.append(("a label behind the last row", counted[-1] & is_last))
    found = count_true([*tokens, *(violated for _, violated in checks)])
    lengths = found[: len(tokens)]
    for (reason, _), violated in zip(checks, found[len(tokens) :], strict=True):
        if any(violated):
            return Refusal(reason)
    if min(map(min, lengths)) < 1:
        return Refusal("a row without a token")
    if sum(map(sum, lengths)) == sum(real.numel() for real in tokens):
        return Refusal("hardly any padding in the batch")
    return lengths


def _side(real: Tensor, lengths: list[int], device: torch.device) -> Side:
    indices = send(places_of(real.reshape(-1), sum(lengths)), device)
    columns = indices % real.shape[1]
    cu_seqlens = send(cumulative(lengths), device)
    # A column may be as large as the batch is wide, if rows are padded on the left or have holes.
    return Side(Rows(cu_seqlens, columns.to(torch.int32), real.shape[1]), indices, *real.shape)


def columns(given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return positions as most models count them: from the left edge, with pads."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def counts(given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Return positions that count tokens only, as OPT's."""
    return (tokens.long().cumsum(1) - 1).clamp(min=0)


def ids_counted(padding_idx: int) -> Callable[[Mapping[str, Any], Tensor], Tensor]:
    """Return RoBERTa's rule of positions: it counts ids that are not `padding_idx`, from `padding_idx + 1` on."""
    return partial(_ids_counted, padding_idx)


def _ids_counted(padding_idx: int, given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    if given.get("input_ids") is None:
        raise CannotPack("positions are counted from ids, and embeddings are given")
    counted = (given["input_ids"] != padding_idx).long()
    return counted.cumsum(1) * counted + padding_idx
