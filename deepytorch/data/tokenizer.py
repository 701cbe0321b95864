"""A byte-level BPE tokenizer, trained on the rows themselves: no download, no unknown character."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from deepytorch.data.cache import cached_json, source_digest
from deepytorch.data.rows import Row
from deepytorch.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The first ids of every tokenizer made here, in this order.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<mask>")
PAD_ID, BOS_ID, EOS_ID, MASK_ID = range(4)

_MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte, so that nothing is unknown


def train_tokenizer(rows: Sequence[Row], vocab_size: int = 8192) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` entries or, when the text is small, fewer.

    The same rows give the same tokenizer. Raises `ConfigError` when `vocab_size` is below 260 (the bytes and the four
    special tokens), or the package tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "tokenizers is not installed, and text is cut into tokens with it. Install it with: "
            "pip install 'deepytorch[hf]'"
        ) from error

    if vocab_size < _MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {vocab_size}, expected at least {_MIN_VOCAB_SIZE}: "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens."
        )
    name = f"bpe-{source_digest(__file__)}-{_digest(rows)}-{vocab_size}-tokenizers{version('tokenizers')}"
    return Tokenizer.from_str(json.dumps(cached_json(name, lambda: json.loads(_train(rows, vocab_size).to_str()))))


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for text in _texts(rows):
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def _train(rows: Sequence[Row], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(rows), trainer=trainer)
    return tokenizer


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield from (row.instruction, row.input, row.output)
