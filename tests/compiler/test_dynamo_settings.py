"""What Dynamo is set to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import funcname_cache, symbolic_convert

from deepytorch.compiler.dynamo import settings


@pytest.fixture(params=[{"trace_call": True}, {"trace_source": True}, {"dynamo": logging.DEBUG}], ids=repr)
def shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """As with TORCH_LOGS=trace_call, trace_source or +dynamo."""
    torch._logging.set_logs(**request.param)
    yield
    torch._logging.set_logs()


def test_no_source_is_read_for_a_log_that_is_off() -> None:
    funcname_cache.clearcache()
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    assert symbolic_convert.get_funcname(__file__, 1) is None
    assert funcname_cache.cache == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Dynamo names functions from Python 3.11 on")
@pytest.mark.usefixtures("shown")
def test_a_log_that_is_on_names_the_function() -> None:
    def wave(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 1

    funcname_cache.clearcache()
    torch.compile(wave, backend="eager")(torch.ones(3))
    assert __file__ in funcname_cache.cache
    line = wave.__code__.co_firstlineno + 1
    name = "test_a_log_that_is_on_names_the_function.wave"
    assert symbolic_convert.get_funcname(__file__, line) == name


def test_functions_among_the_settings_are_no_error_of_dynamos_metrics(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torch").addHandler(caplog.handler)  # which hands nothing on
    try:
        with torch._dynamo.config.patch(raise_on_ctx_manager_usage=len):  # no version takes this one out
            torch.compile(lambda x: x.tan() + 1, backend="eager")(torch.ones(3))
    finally:
        logging.getLogger("torch").removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_preparing_twice_changes_nothing_twice() -> None:
    before = symbolic_convert.get_funcname
    settings.prepare_dynamo()
    assert symbolic_convert.get_funcname is before
    assert not hasattr(before.__wrapped__, "__wrapped__")
