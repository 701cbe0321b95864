"""Breaks the core of padding removal a line at a time, and requires that a fast test notices each.

    python tests/mutations.py [--jobs 2] [--only PATTERN]

Every mutation is made in a copy of the tree. The tests `TESTS` of `tests/passes` run there with `-x`, those of the
broken module first; green without a mutation, red with it. The outcome is written to docs/results/mutations.json, where
`--only` replaces the rows that it chose; the exit status is 1 where a mutation survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
import torch._dynamo

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "results" / "mutations.json"
TESTS = (
    "test_layout", "test_origins", "test_demand", "test_masks", "test_emit", "test_functional", "test_routing",
    "test_rules",
)  # fmt: skip
# The tests that look at a module most closely; all others follow.
FIRST = {
    "rules": "test_rules", "layout": "test_layout", "demand": "test_demand", "origins": "test_origins",
    "masks": "test_masks", "probes": "test_masks", "attentions": "test_masks", "emit": "test_emit",
    "analysis": "test_emit", "write_program": "test_emit", "strip_padding": "test_demand", "batch_facts": "test_emit",
    "routing": "test_routing", "functional": "test_functional",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One line made wrong: `old`, which stands in `file` exactly once, becomes `new`."""

    file: str
    old: str
    new: str
    why: str


UNPAD = "passes/unpad/"
MUTATIONS = (
    # ---------------------------------------------------------------- rules
    Mutation(
        UNPAD + "rules.py",
        "if dim == () or dim == target:",
        "if dim == () or len(dim) == len(target):",
        "a value cut at one end lines up with one cut at the other: neighbours meet",
    ),
    Mutation(
        UNPAD + "rules.py",
        "if from_batch and _same_grid(dim, target):",
        "if _same_grid(dim, target):",
        "the model's own values lose where their positions start",
    ),
    Mutation(
        UNPAD + "rules.py",
        "return all(len(layout[index]) == 1 for index in token_dims(layout)) and",
        "return True and",
        "positions merged with numbers are gathered as positions",
    ),
    Mutation(
        UNPAD + "rules.py",
        "if layout is None or token_dims(layout) or len(layout) > 2:",
        "if layout is None or len(layout) > 2:",
        "a bias with one row a token is taken for a vector",
    ),
    Mutation(
        UNPAD + "rules.py",
        "return a[:-2] == b[:-2] == layouts[node][:-2] and",
        "return a[:-2] == layouts[node][:-2] and",
        "a token's matrix is multiplied with its neighbour's",
    ),
    Mutation(
        UNPAD + "rules.py",
        "if dims is None or not all(_plain(x[dim]) for dim in dims):",
        "if dims is None or not any(_plain(x[dim]) for dim in dims):",
        "a reduction over positions is admitted if it is over another dimension too",
    ),
    Mutation(
        UNPAD + "rules.py",
        "if token_dims(layout) != token_dims(x) or any(layout[dim] != x[dim] for dim in token_dims(x)):",
        "if [layout[dim] for dim in token_dims(layout)] != [x[dim] for dim in token_dims(x)]:",
        "an index whose positions stand elsewhere looks positions up",
    ),
    Mutation(
        UNPAD + "rules.py",
        "or any(layout[dim] != x[dim] for dim in token_dims(x)):",
        "or False:",
        "a gather takes its neighbour's index",
    ),
    Mutation(
        UNPAD + "rules.py",
        "not all(_plain(dim) for dim in x[-over:])",
        "not all(_plain(dim) for dim in x[-1:])",
        "a norm over positions and features is admitted",
    ),
    Mutation(
        UNPAD + "rules.py",
        'if arguments_of(node)["scale_grad_by_freq"]:',
        "if False:",
        "gradients are divided by how often an id stands at a token, instead of anywhere",
    ),
    Mutation(
        UNPAD + "rules.py",
        "others != [other for index, other in enumerate(out) if index != dim]:",
        "len(others) != len(out) - 1:",
        "neighbours are joined",
    ),
    Mutation(
        UNPAD + "rules.py",
        "return isinstance(rule, AlongPlain) and rule.admits(parent, layouts, from_batch)",
        "return isinstance(rule, AlongPlain)",
        "an item of a sort along positions is admitted",
    ),
    Mutation(
        UNPAD + "rules.py",
        "if torch.Tag.pointwise in target.tags and not random:",
        "if torch.Tag.pointwise in target.tags:",
        "operators that draw random numbers have the rule of elementwise ones",
    ),
    Mutation(
        UNPAD + "rules.py", "if kept == sorted(kept):", "if True:", "heads that change places stay where they were"
    ),
    # ---------------------------------------------------------------- layout
    Mutation(
        UNPAD + "layout.py",
        "Positions(old[0].symbol, old[0].offset + start, int(cut))",
        "Positions(old[0].symbol, start, int(cut))",
        "a slice of a slice forgets where the first one started",
    ),
    Mutation(
        UNPAD + "layout.py",
        "len(positions) == 1 and 0 <= positions[0].offset <= positions[0].cut",
        "len(positions) == 1",
        "positions beyond the space are taken for some of it",
    ),
    Mutation(
        UNPAD + "layout.py",
        "return tuple(result) if not atoms else None",
        "return tuple(result)",
        "a view may lose atoms",
    ),
    Mutation(
        UNPAD + "layout.py", "sorted(sources, key=from_batch)", "sources", "a label's start is taken for the model's"
    ),
    Mutation(
        UNPAD + "layout.py",
        "known[node] = _from_start(layout) if from_batch(node) else layout",
        "known[node] = layout",
        "labels that were shifted keep an offset, which is not theirs",
    ),
    Mutation(
        UNPAD + "layout.py",
        "ordered = len(first) == 2 and first[0] is ROWS and isinstance(first[1], Positions)",
        "ordered = len(first) == 2",
        "(positions, rows) leaves the region as (rows, positions)",
    ),
    # ---------------------------------------------------------------- demand, origins
    Mutation(
        UNPAD + "demand.py",
        "            return TOKENS\n        return self if",
        "            return self\n        return self if",
        "two losses over one value: the second finds the first one's entries",
    ),
    Mutation(
        UNPAD + "demand.py",
        "        return TOKENS\n    return EVERYTHING",
        "        return TOKENS\n    return TOKENS",
        "an output that is seen at pads is computed at tokens alone",
    ),
    Mutation(
        UNPAD + "demand.py",
        "yield source, demand if token else EVERYTHING",
        "yield source, demand",
        "a table that all tokens read is asked for at tokens",
    ),
    Mutation(
        UNPAD + "demand.py",
        "yield from ((source, EVERYTHING) for source in node.all_input_nodes)",
        "yield from ((source, TOKENS) for source in node.all_input_nodes)",
        "an operator that looks across positions is fed tokens",
    ),
    Mutation(
        UNPAD + "demand.py",
        "wanted = TOKENS if all_tokens else labelled(seen.losses[node])",
        "wanted = labelled(seen.losses[node])",
        "a loss that runs on all tokens finds labelled ones",
    ),
    Mutation(
        UNPAD + "demand.py",
        "yield from ((bias, EVERYTHING) for bias in seen.biases[node])",
        "yield from ((bias, TOKENS) for bias in seen.biases[node])",
        "a bias is asked for at tokens",
    ),
    Mutation(
        UNPAD + "demand.py",
        "if attention is not None and demand.packable:",
        "if attention is not None:",
        "an attention whose output is seen at pads has packed inputs",
    ),
    Mutation(
        UNPAD + "demand.py",
        "return self.level <= _TOKENS",
        "return self.level <= _EVERYTHING",
        "everything may be packed",
    ),
    Mutation(
        UNPAD + "strip_padding.py",
        "        if node not in seen.zero_at_pads:\n            return None\n",
        "        pass\n",
        "what is seen at pads is packed",
    ),
    Mutation(
        UNPAD + "origins.py",
        "return len(groups) <= 1",
        "return len(groups) <= 2",
        "a source is packed by the target's mask",
    ),
    Mutation(UNPAD + "origins.py", "elif node in query_of:", "elif False:", "an attention's output follows its keys"),
    # ---------------------------------------------------------------- routing, writes in place
    Mutation(
        UNPAD + "masks.py",
        'if term.kind == "factor" and not (',
        'if term.kind == "factor" and False and not (',
        "scores that are seen are multiplied by a mask",
    ),
    Mutation(
        UNPAD + "analysis.py",
        "            _check_writes(attention, region.slicer)\n",
        "",
        "an attention reads its operands behind a later write",
    ),
    Mutation(
        UNPAD + "rules.py",
        "return emitter.narrowed(made, home, entries)",
        "return made",
        "an item holds the entries of the others",
    ),
    Mutation(
        UNPAD + "routing.py",
        "if one_exit and all(",
        "if one_exit or all(",
        "entries of a sort that more is read of are packed",
    ),
    Mutation(
        UNPAD + "routing.py",
        "    if not _numbers_groups(sort.args[0], groups):\n        return None\n",
        "",
        "any keys number the groups",
    ),
    Mutation(
        UNPAD + "routing.py",
        'if low != 0 or high not in (groups - 1, groups) or arguments_of(sort)["descending"]:',
        "if low != 0:",
        "keys share a bin, or stand in the opposite order",
    ),
    Mutation(
        UNPAD + "routing.py",
        "if held is None or node.args[1] != held.per_token or not floors:",
        "if held is None or not floors:",
        "entries belong to other tokens",
    ),
    Mutation(
        "passes/functional.py",
        "return not changed and not grad_off.intersection(parts)",
        "return not changed",
        "a part that was written without gradients gets one",
    ),
    Mutation(
        "passes/functional.py",
        "node not in grad_off and _keeps_form(node)",
        "_keeps_form(node)",
        "a write behind the back of gradients gets one",
    ),
    Mutation(
        "passes/functional.py",
        "return any(place[view] < place[write] <= last for write in writes)",
        "return False",
        "a view shows the value before a write",
    ),
    # ---------------------------------------------------------------- masks, attentions
    Mutation(
        UNPAD + "masks.py",
        '"nonzero": lambda value: value != 0,',
        '"nonzero": lambda value: value == 0,',
        "pads are read as tokens",
    ),
    Mutation(
        UNPAD + "masks.py",
        "if (mask & looking[:, :, None] & ~tokens[:, None, :]).any():",
        "if False:",
        "tokens may see pads",
    ),
    Mutation(
        UNPAD + "masks.py",
        "if any(-left <= offset <= right for offset in unseen):",
        "if False:",
        "strides pass for windows",
    ),
    Mutation(
        UNPAD + "masks.py",
        "    if 0 not in seen:\n        return None\n",
        "",
        "a token that does not see itself passes",
    ),
    Mutation(
        UNPAD + "masks.py",
        "left, right = -min(seen), max(seen)",
        "left, right = -min(seen) + 1, max(seen)",
        "a window one too wide",
    ),
    Mutation(
        UNPAD + "masks.py",
        'assumed=() if domain == "any" else',
        "assumed=() if domain else",
        "numbers besides 0 and 1 are not looked for",
    ),
    Mutation(
        UNPAD + "masks.py",
        "if not (visible == visible[:, :1]).all():",
        "if False:",
        "the first head's mask is taken for all",
    ),
    Mutation(
        UNPAD + "probes.py",
        "if not tables and only_linear and total",
        "if not tables and total",
        "a mask of any arithmetic is proved for any length",
    ),
    Mutation(
        UNPAD + "attentions.py",
        "return number is not None and number <= MASKED",
        "return number is not None and number < 0",
        "a score lowered by a little counts as hidden",
    ),
    Mutation(
        UNPAD + "attentions.py",
        "    if not _closed(inner, output):\n        return None\n",
        "",
        "scores that an output shows are left out",
    ),
    # ---------------------------------------------------------------- analysis, writing
    Mutation(
        UNPAD + "analysis.py",
        "if sources and (sees_pads or not _agree(",
        "if sources and (not _agree(",
        "an attention that sees pads is packed",
    ),
    Mutation(
        UNPAD + "analysis.py",
        "elif node.target is aten.masked_fill.Scalar and node.args[2] == 0:",
        "elif node.target is aten.masked_fill.Scalar:",
        "what is filled with another number counts as zero",
    ),
    Mutation(
        UNPAD + "emit.py",
        "return self.call(aten.add.Tensor, (start, self.columns(entries, offset)))",
        "return self.call(aten.add.Tensor, (start, self.columns(entries)))",
        "a slice is gathered one position late",
    ),
    Mutation(
        UNPAD + "emit.py",
        "index = self.rows(entries) if has_rows(layout) else self.columns(entries, grid.offset)",
        "index = self.rows(entries) if has_rows(layout) else self.columns(entries)",
        "a table of positions is read one position late",
    ),
    Mutation(
        UNPAD + "emit.py",
        "ends_before = entries.cut - entries.offset >= home.cut - home.offset",
        "ends_before = True",
        "entries past the end of a slice are looked for in it",
    ),
    Mutation(
        UNPAD + "emit.py", '"window_right": meaning.window_right,', '"window_right": -1,', "tokens see later ones"
    ),
    Mutation(
        UNPAD + "write_program.py",
        "        if node.target is aten.masked_fill.Scalar:\n",
        "        if False:\n",
        "a fill is checked to be off at pads",
    ),
    Mutation(
        UNPAD + "write_program.py",
        "ignores_pads=loss in region.entries and not",
        "ignores_pads=False and not",
        "labels at pads are not looked for",
    ),
    # ---------------------------------------------------------------- a step
    Mutation(
        "compiler/step/batch_facts.py",
        "torch.tensor([0, *itertools.accumulate(lengths)]",
        "torch.tensor([*itertools.accumulate(lengths)]",
        "cu_seqlens without its zero",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "torch.empty((max(facts.lengths[entries.space]), 0)",
        "torch.empty((max(facts.lengths[entries.space]) - 1, 0)",
        "the longest row is one too short",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "labelled[number] > masks[loss.space]",
        "labelled[number] > labelled[number]",
        "a label at a pad is kept",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "whole[:, loss.offset : loss.offset + counts.shape[1]] = counts",
        "whole[:, : counts.shape[1]] = counts",
        "labels stand where their slice starts",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "stop = mask.shape[1] - entries.cut + entries.offset",
        "stop = mask.shape[1] - entries.cut",
        "the last entries of a slice are left out",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "starts.sum(1) + mask[:, 0] > 1",
        "starts.sum(1) + mask[:, 0] > 2",
        "a window counts distances across a hole",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "            if space.prefix:\n",
        "            if False:\n",
        "tokens see pads before them",
    ),
    Mutation(
        "compiler/step/batch_facts.py",
        "(value != 0) & ~own))",
        "(value != 0) & own & ~own))",
        "a pooling that keeps pads is not noticed",
    ),
)


def copy_tree(folder: Path) -> Path:
    """The code and the tests of this tree, where they may be broken."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for name in ("comm", "compiler", "deepytorch", "passes", "tests"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def start_tests(tree: Path, names: tuple[str, ...]) -> int:
    """Run some test files in a process of their own, and return its number. torch is imported already: it is forked."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        sys.path[:] = [
            str(tree),
            *(entry for entry in sys.path if not Path(entry or ".").resolve().is_relative_to(ROOT)),
        ]
        sys.dont_write_bytecode = True
        files = [f"tests/passes/{name}.py" for name in names]
        code = int(pytest.main(["-n", "0", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *files]))
        if not Path(sys.modules["deepytorch"].__file__ or "").is_relative_to(tree):
            code = 98
        sys.stdout.flush()
    finally:
        os._exit(code)


def first_failure(tree: Path, status: int) -> str | None:
    """The test that failed in the run that ended so; None where all passed. Any other end is our own fault."""
    text = (tree / "log").read_text()
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/passes/)?(.*?)(?: - .*)?$", text, re.MULTILINE)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    if code != 1 or failed is None or "::" not in failed[1]:
        raise RuntimeError(f"pytest ended with {code}:\n{text}")
    return failed[1]


def broken(mutation: Mutation) -> str:
    """The text of the file with its line made wrong."""
    text = (ROOT / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: found {text.count(mutation.old)} times, expected once:\n{mutation.old}")
    text = text.replace(mutation.old, mutation.new)
    compile(text, mutation.file, "exec")  # what is no Python is noticed by any test
    return text


def judge(mutations: Sequence[Mutation], trees: list[Path]) -> list[str | None]:
    """The test that notices each mutation, one mutation a tree at a time; tests of its module come first."""
    found: list[str | None] = [None] * len(mutations)
    waiting = list(range(len(mutations)))[::-1]
    running: dict[int, tuple[int, Path, bool]] = {}
    while waiting or running:
        while waiting and trees:
            number, tree = waiting.pop(), trees.pop()
            mutation = mutations[number]
            (tree / mutation.file).write_text(broken(mutation))
            running[start_tests(tree, (FIRST[Path(mutation.file).stem],))] = number, tree, True
        process, status = os.wait()
        number, tree, is_first = running.pop(process)
        mutation, test = mutations[number], first_failure(tree, status)
        if test is None and is_first:
            others = tuple(name for name in TESTS if name != FIRST[Path(mutation.file).stem])
            running[start_tests(tree, others)] = number, tree, False
            continue
        (tree / mutation.file).write_text((ROOT / mutation.file).read_text())
        trees.append(tree)
        found[number] = test
        print(f"{'killed  ' if test else 'SURVIVED'} {mutation.file}: {mutation.why}  [{test}]", flush=True)
    return found


def write_table(found: dict[Mutation, str | None]) -> None:
    """Write the outcome; what was not run again keeps its row, as long as mutation and torch are the same."""
    rows = {}
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {"mutations": []}
    for row in before["mutations"] if before.get("torch") == torch.__version__ else ():
        rows[(row["file"], *row["mutation"], row["why"])] = row
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    for mutation, test in found.items():
        key = (mutation.file, mutation.old, mutation.new, mutation.why)
        rows[key] = {"mutation": key[1:3], "file": key[0], "why": key[3], "killed by": test, "date": date}
    kept = [rows[key] for m in MUTATIONS if (key := (m.file, m.old, m.new, m.why)) in rows]
    table = {"command": "python tests/mutations.py", "torch": torch.__version__, "mutations": kept}
    RESULT.write_text(json.dumps(table, indent=1) + "\n")


def main() -> int:
    """Run what was asked for; how many mutations survived decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="trees that are tested at a time")
    parser.add_argument(
        "--only", default="", help="mutations in whose file or reason this pattern is found; the others keep their rows"
    )
    options = parser.parse_args()
    for mutation in MUTATIONS:
        broken(mutation)  # each line must be there before any time is spent
    chosen = [mutation for mutation in MUTATIONS if re.search(options.only, f"{mutation.file} {mutation.why}")]
    needed = dict.fromkeys(FIRST[Path(mutation.file).stem] for mutation in chosen) if options.only else TESTS
    with tempfile.TemporaryDirectory(prefix="deepytorch-mutations-") as folder:
        trees = [copy_tree(Path(folder).resolve() / str(number)) for number in range(options.jobs)]
        _, status = os.waitpid(start_tests(trees[0], tuple(needed)), 0)
        failed = first_failure(trees[0], status)
        if failed is not None:
            print(f"red without a mutation: {failed}")
            return 1
        found = judge(chosen, trees)
    survived = found.count(None)
    print(f"{len(found) - survived} of {len(found)} mutations are noticed")
    write_table(dict(zip(chosen, found, strict=True)))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
