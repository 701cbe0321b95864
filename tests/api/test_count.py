"""What `python -m tests.count` counts."""

from __future__ import annotations

import ast

import pytest

from tests import count


@pytest.mark.parametrize(
    ("docstring", "unclear"),
    [
        ("What is kept.", True),
        ("Whether it is so.", True),
        ("Of all that live.", True),
        ("The same, again.", True),
        ("How many there are.", True),
        ("Return whether it is so.", False),
        ("Ask the model.", False),  # "As" alone is a word
        ("Offsets of the rows, in tokens.", False),
    ],
)
def test_docstrings_whose_first_word_names_no_subject(docstring: str, unclear: bool) -> None:
    assert count.is_unclear(docstring) is unclear


def test_containers_that_are_empty_at_first_are_registries() -> None:
    source = (
        "A = {}\nB: dict[int, str] = {}\nC = WeakKeyDictionary[int, str]()\nD = {1: 2}\nE = ()\ndef f():\n    G = {}\n"
    )
    assert count._registries(ast.parse(source)) == 3


def test_the_product_is_read_whole() -> None:
    counts = count.read()
    assert counts["lines of product"] > 10_000
    assert counts["files of product"] > 100
    assert counts["docstrings"] > 1000
    assert counts["context variables"] > 0
