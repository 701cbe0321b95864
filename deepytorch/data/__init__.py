"""Real text of uneven lengths for fine-tuning runs, on any machine and without a network.

The embedded rows are made from the signatures and docstrings of the installed standard library and of torch, as
instruction -> response rows. A file in the Alpaca layout replaces them if the user has one.
"""

from __future__ import annotations

from deepytorch.data.batching import (
    IGNORE_INDEX,
    batches,
    num_labels,
    num_positions,
    num_tokens,
    prompt_text,
    text_batches,
)
from deepytorch.data.library_docs import library_rows
from deepytorch.data.rows import Row, load_rows, read_alpaca
from deepytorch.data.tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, train_tokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "IGNORE_INDEX",
    "MASK_ID",
    "PAD_ID",
    "Row",
    "batches",
    "library_rows",
    "load_rows",
    "num_labels",
    "num_positions",
    "num_tokens",
    "prompt_text",
    "read_alpaca",
    "text_batches",
    "train_tokenizer",
]
