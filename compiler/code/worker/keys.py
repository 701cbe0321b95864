"""The keys of torch's cache of compiled code, by their parts: two processes that disagree are told where.

torch looks compiled code up by a hash of the graph, its inputs, all settings and the system
(`AOTAutogradCacheDetails`), and logs the hash of each part for whoever debugs it. That log is listened to here; it is
the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

Key = Mapping[str, Sequence[str]]  # by the name of a part, its hash and its value

_LOGGER = "torch._functorch._aot_autograd.autograd_cache"
_SAYS = "Autograd graph cache hash details"
_PART = re.compile(r"\[(\w+)\] ([^:]+): (.*)")
_LONGEST = 80  # characters of a value that are told
_BEFORE = 20  # of these, before the first that differs
_MOST = 8  # parts that are told


@contextlib.contextmanager
def seen(is_wanted: bool = True) -> Iterator[dict[str, tuple[str, str]]]:
    """Collect the parts of the key by which torch looks for code inside of the block, if they are wanted."""
    logger, found = logging.getLogger(_LOGGER), dict[str, tuple[str, str]]()
    if not is_wanted:
        yield found
        return
    before, shown = logger.level, logger.getEffectiveLevel()

    def listen(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(_SAYS):
            found.update(_parts(record.getMessage()))
        return record.levelno >= shown  # others get what they would get without us

    logger.addFilter(listen)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.setLevel(before)
        logger.removeFilter(listen)


def differences(theirs: Key, ours: Key) -> list[str]:
    """Return what is not equal in two processes, a sentence each: no more than eight, and the number of the others."""
    if not theirs or not ours:
        return [f"torch told no parts of the key in {'that' if ours else 'this'} process"]
    told = []
    for name in dict.fromkeys([*theirs, *ours]):
        (hash_there, there), (hash_here, here) = theirs.get(name, ("", "nothing")), ours.get(name, ("", "nothing"))
        if hash_there != hash_here:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(there, here, strict=False)))
            told.append(f"{name} is {_at(there, same)} there and {_at(here, same)} here")
    if not told:
        return ["the keys are equal: what was kept is gone, or its guards do not hold"]
    return told[:_MOST] + ([f"{len(told) - _MOST} other parts differ"] if len(told) > _MOST else [])


def _parts(text: str) -> dict[str, tuple[str, str]]:
    found, name = dict[str, tuple[str, str]](), ""
    for line in text.splitlines()[1:]:
        match = _PART.fullmatch(line)
        if match is not None:
            digest, name, value = match.groups()
            found[name] = digest, value
        elif name:  # a value of several lines
            found[name] = found[name][0], f"{found[name][1]}\n{line}"
    return found


def _at(value: str, place: int) -> str:
    """Return a value if it is short, else what is around a place of it, in one line."""
    if len(value) > _LONGEST:
        begin = max(0, place - _BEFORE)
        end = begin + _LONGEST
        value = f"{'...' * (begin > 0)}{value[begin:end]}{'...' * (end < len(value))}"
    return " ".join(value.split())
