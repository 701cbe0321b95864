"""The embedded rows, the Alpaca reader, the tokenizer, the batches and the cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from deepytorch.data import (
    BOS_ID,
    EOS_ID,
    IGNORE_INDEX,
    MASK_ID,
    PAD_ID,
    Row,
    batches,
    load_rows,
    prompt_text,
    train_tokenizer,
)
from deepytorch.data.cache import cached_json
from deepytorch.errors import ConfigError, DataError

VOCAB_SIZE = 2048


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def rows():
    return load_rows()


@pytest.fixture(scope="module")
def tokenizer(rows):
    return train_tokenizer(rows[::4], VOCAB_SIZE)


def test_embedded_rows_are_thousands_and_come_back_the_same_from_the_cache(rows):
    assert len(rows) > 3000
    assert len(set(rows)) == len(rows)
    assert all(row.instruction and row.output for row in rows)
    assert {"json.dumps", "torch.nn.modules.linear.Linear", "torch.matmul"} <= _names(rows)
    assert load_rows() == rows


def test_randomly_drawn_batches_are_about_half_padding_as_alpaca_s(rows, tokenizer):
    drawn = list(batches(rows, tokenizer, batch_size=8, max_length=1024, steps=60))
    real = sum(batch["attention_mask"].sum().item() for batch in drawn)
    assert 0.4 < real / sum(batch["input_ids"].numel() for batch in drawn) < 0.6


def test_alpaca_file_is_read_and_rows_without_output_are_left_out(tmp_path):
    path = tmp_path / "rows.json"
    items = [
        {"instruction": "Add.", "input": "1 2", "output": "3", "id": 7},
        {"instruction": "Say hi.", "output": "hi"},
    ]
    path.write_text(json.dumps([*items, {"instruction": "x", "input": "", "output": ""}]))
    assert load_rows(path) == [Row("Add.", "1 2", "3"), Row("Say hi.", "", "hi")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b'"\xff"', "is not JSON"),
        (b'{"instruction": "a"}', "holds one dict, not a list"),
        (b"[1]", "Item 0 .* is a int"),
        (b'[{"instruction": "a", "output": "b"}, {"instruction": "a"}]', '"output" of item 1 .* is missing'),
        (b'[{"instruction": ["a"], "output": "b"}]', '"instruction" of item 0 .* is a list'),
        (b"[]", "no row with an output"),
    ],
)
def test_a_bad_file_is_refused_with_what_was_found(tmp_path, content, message):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.json cannot be read: No such file"):
        load_rows(tmp_path / "nothing.json")


def test_tokenizer_round_trips_any_text_and_has_the_special_ids(tokenizer):
    text = "def f(x: int) -> str:\n    return 'größe 漢字 \x00 🙂'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<bos>", "<eos>", "<mask>")] == [0, 1, 2, 3]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_tokenizer_is_the_same_trained_twice(rows, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert train_tokenizer(rows[::4], VOCAB_SIZE).to_str() == tokenizer.to_str()


def test_without_the_package_it_is_said_what_to_install(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"tokenizers is not installed.*pip install 'deepytorch\[hf\]'"):
        train_tokenizer(rows)


def test_a_vocabulary_without_room_for_the_bytes_is_refused(rows):
    with pytest.raises(ConfigError, match="vocab_size is 100, expected at least 260"):
        train_tokenizer(rows, 100)


@pytest.mark.parametrize("pad_side", ["right", "left"])
@pytest.mark.parametrize("labels", ["response", "all"])
def test_causal_batch_holds_prompt_and_response(rows, tokenizer, pad_side, labels):
    batch = _first(rows[:3], tokenizer, batch_size=3, labels=labels, pad_side=pad_side)
    for ids, mask, targets in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"], strict=True):
        length = int(mask.sum())
        start = 0 if pad_side == "right" else len(ids) - length
        assert mask[start : start + length].all()
        assert (ids[~mask] == PAD_ID).all()
        assert (targets[~mask] == IGNORE_INDEX).all()
        row = next(row for row in rows[:3] if tokenizer.decode(ids[mask].tolist()) == prompt_text(row) + row.output)
        assert (ids[mask][0], ids[mask][-1]) == (BOS_ID, EOS_ID)
        picked = targets != IGNORE_INDEX
        assert torch.equal(targets[picked], ids[picked])
        wanted = row.output if labels == "response" else prompt_text(row) + row.output
        assert tokenizer.decode(targets[picked].tolist()) == wanted
    assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1]


def test_masked_batch_asks_for_15_percent_of_the_tokens(rows, tokenizer):
    plain, masked = (_first(rows, tokenizer, batch_size=64, kind=kind, labels="all") for kind in ("causal", "masked"))
    picked = masked["labels"] != IGNORE_INDEX
    candidates = plain["input_ids"] > MASK_ID
    assert picked.sum() / candidates.sum() == pytest.approx(0.15, abs=0.001)
    assert not (picked & ~candidates).any()
    assert torch.equal(masked["labels"][picked], plain["input_ids"][picked])
    assert torch.equal(masked["input_ids"][~picked], plain["input_ids"][~picked])
    assert (masked["input_ids"][picked] == MASK_ID).float().mean() == pytest.approx(0.8, abs=0.05)
    assert (masked["input_ids"] == plain["input_ids"])[picked].float().mean() == pytest.approx(0.1, abs=0.05)


def test_seq2seq_batch_is_prompt_to_response_without_a_decoder_mask(rows, tokenizer):
    batch = _first(rows[:2], tokenizer, batch_size=2, kind="seq2seq")
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    texts = {prompt_text(row): row.output for row in rows[:2]}
    for ids, targets in zip(batch["input_ids"], batch["labels"], strict=True):
        real = targets[targets != IGNORE_INDEX]
        assert tokenizer.decode(real.tolist()) == texts[tokenizer.decode(ids.tolist())]
        assert torch.equal(targets[: len(real)], real)


def test_rows_are_drawn_once_each_before_any_comes_again_and_differently_for_another_seed(tokenizer):
    rows = [Row(f"number {n}", "", "ok") for n in range(12)]

    def drawn(seed: int) -> list[str]:
        found = batches(rows, tokenizer, batch_size=4, max_length=128, seed=seed, steps=6)
        return [
            tokenizer.decode(ids.tolist()).split("number ")[1].split("\n")[0] for b in found for ids in b["input_ids"]
        ]

    first = drawn(0)
    assert len(first) == 24
    assert sorted(first[:12]) == sorted(first[12:]) == sorted(str(n) for n in range(12))
    assert first == drawn(0) != drawn(1)


def test_long_rows_are_cut_and_rows_with_no_room_for_a_response_left_out(tokenizer):
    rows = [Row("a", "", "word " * 300), Row("word " * 300, "", "b")]
    batch = _first(rows, tokenizer, batch_size=1, max_length=128)
    assert batch["input_ids"].shape == (1, 128)
    with pytest.raises(DataError, match="1 of 2 rows have a prompt shorter than 128 tokens"):
        batches(rows, tokenizer, batch_size=2, max_length=128)


@pytest.mark.parametrize("option", [{"labels": "prompt"}, {"kind": "mlm"}, {"pad_side": "up"}, {"batch_size": 0}])
def test_bad_options_are_refused_at_the_call(rows, tokenizer, option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))} is .*, expected"):
        batches(rows, tokenizer, **({"batch_size": 2, "max_length": 64} | option))


def test_cache_builds_once_and_is_for_this_user_alone(tmp_path):
    directory, calls = tmp_path / "cache", []
    for _ in range(2):
        assert cached_json("x", lambda: calls.append(1) or [1, "ü"], directory=directory) == [1, "ü"]
    assert len(calls) == 1
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]


def test_cache_replaces_a_broken_file(tmp_path):
    directory = tmp_path / "cache"
    cached_json("x", lambda: 1, directory=directory)
    (directory / "x.json").write_text('{"half')
    assert cached_json("x", lambda: 2, directory=directory) == 2
    assert json.loads((directory / "x.json").read_text()) == 2


@pytest.mark.parametrize("kind", ["open mode", "link", "other owner"])
def test_cache_that_others_could_write_is_neither_read_nor_written(tmp_path, monkeypatch, kind):
    directory = _untrusted(tmp_path, kind, monkeypatch)
    (directory / "x.json").write_text('"planted"')
    assert cached_json("x", lambda: "built", directory=directory) == "built"
    assert (directory / "x.json").read_text() == '"planted"'


def _untrusted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    if kind == "open mode":
        real.chmod(0o770)
    elif kind == "other owner":
        monkeypatch.setattr(os, "getuid", lambda: real.stat().st_uid + 1)
    else:
        (tmp_path / "link").symlink_to(real)
        return tmp_path / "link"
    return real


def _first(rows, tokenizer, **options) -> dict[str, torch.Tensor]:
    return next(batches(rows, tokenizer, **({"max_length": 4096} | options)))


def _names(rows: list[Row]) -> set[str]:
    return {row.instruction.split("`")[1] for row in rows}
