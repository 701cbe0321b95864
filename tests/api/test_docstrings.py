"""Docstrings of the product begin with a word that names their subject."""

from __future__ import annotations

import ast

from tests import count


def test_no_docstring_begins_with_a_word_that_names_no_subject() -> None:
    found = [each for path, tree in count.trees_of_product().items() for each in count.unclear_docstrings(path, tree)]
    refused = ", ".join(count.UNCLEAR)
    assert not found, "\n".join([f"begin with an imperative or a noun, not with {refused}:", *found])


def test_a_finding_names_file_and_line() -> None:
    source = (
        '"""A module."""\n\ndef clear():\n    """Return it."""\n\n'
        'class Unclear:\n    """What is kept.\n\n    As it is.\n    """\n'
    )
    found = count.unclear_docstrings(count.ROOT / "comm/group/some.py", ast.parse(source))
    assert found == ["comm/group/some.py:7: What is kept."]
