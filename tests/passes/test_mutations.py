"""`tests/mutations.py` takes minutes and runs by hand; that its lines still stand is looked at here."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, Mutation, broken


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.why)
def test_each_line_that_is_to_be_broken_stands_once(mutation: Mutation) -> None:
    assert mutation.new in broken(mutation)


def test_a_line_that_has_gone_is_named() -> None:
    with pytest.raises(SystemExit, match="found 0 times, expected once"):
        broken(Mutation("passes/unpad/rules.py", "no such line", "", "a test"))
