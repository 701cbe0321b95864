"""The result of `deepytorch bench unpad`: its keys, and what it refuses beyond its types."""

from __future__ import annotations

import pytest

from deepytorch.bench.schema import UnpadResult
from deepytorch.errors import DataError

VALUES = {
    "model": "llama",
    "device": "cpu",
    "dtype": "fp32",
    "batch_size": 8,
    "real_token_fraction": 0.5,
    "ratio_vs_eager": 2.1,
    "ratio_vs_inductor": 2.2,
    "ratio_vs_handpacked": 1.1,
    "max_loss_rel_diff": 1e-7,
    "max_grad_rel_diff": 1e-6,
    "recompiles": 1,
    "steps_packed": 24,
    "steps_padded": 0,
    "compile_seconds": 20.0,
    "compile_seconds_inductor": 30.0,
    "peak_memory_ratio_vs_eager": 0.5,
    "labels": "response",
    "loss": "model",
    "token_ceiling": 2.0,
    "labelled_fraction": 0.7,
    "ratio_no_padding": 1.0,
    "host_ms_per_step": 0.4,
    "grad_rel_diffs": {"inductor": 1e-6},
    "step_ms": {"eager": 100.0},
    "ratio_quartiles": {"eager": [1.9, 2.0, 2.1]},
    "peak_bytes": {"eager": 10},
    "steps": 8,
    "rounds": 3,
    "max_length": 1024,
    "model_size": "small",
    "torch_version": "2.13.0",
    "machine": "x86_64",
    "weights": "fp32",
    "vocab_size": 8192,
    "timing": "one by one",
    "tokens_per_s": {"eager": 5000.0},
    "ratio_vs_grouped": None,
    "ratio_vs_flattened": 1.2,
    "not_run": {"grouped": "for another time"},
}

ASKED_FOR = {
    *("model", "device", "dtype", "batch_size", "real_token_fraction", "ratio_vs_eager", "ratio_vs_inductor"),
    *("ratio_vs_handpacked", "max_loss_rel_diff", "max_grad_rel_diff", "recompiles", "steps_packed", "steps_padded"),
    *("compile_seconds", "compile_seconds_inductor", "peak_memory_ratio_vs_eager"),
}


def test_the_keys_that_others_read_are_there():
    content = UnpadResult(**VALUES).to_json()
    assert content == VALUES
    assert set(content) >= ASKED_FOR


@pytest.mark.parametrize("wrong", [{"ratio_vs_eager": None}, {"real_token_fraction": 1.2}])
def test_values_that_no_run_gives_are_refused(wrong):
    with pytest.raises(DataError, match=f"{next(iter(wrong))} of the result is "):
        UnpadResult(**VALUES | wrong)
