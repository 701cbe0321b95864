"""A part of torch's own tests of process groups, by the import line alone; tests/comm/torch_suite/run.py runs all."""

from __future__ import annotations

import pytest

from tests.comm.torch_suite.run import compare, run_suite

CHOSEN = [
    "test_all_gather",
    "test_all_reduce_sum_async",
    "test_all_reduce_coalesced_sum",
    "test_all_to_all_single_unequal_split",
    "test_barrier_full_group",
    "test_broadcast_object_list",
    "test_ddp_logging_data_cpu",
    "test_gather_group",
    "test_get_backend",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_new_subgroups",
    "test_reduce_product",
    "test_scatter_object_list",
    "test_send_recv",
]


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_what_passes_on_stock_gloo_passes_on_ours() -> None:
    pytest.importorskip("expecttest")
    stock, ours = (run_suite(import_line, 2, CHOSEN, timeout=180) for import_line in (False, True))
    passed = [name for name, (outcome, _, _) in stock.items() if outcome == "passed"]
    assert len(passed) > len(CHOSEN) // 2, stock
    assert not [line for line in compare([stock], [ours]) if "passes on stock" in line]
