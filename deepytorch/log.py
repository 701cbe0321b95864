"""The one logger of the whole package, so that a user sets its level in one place."""

from __future__ import annotations

import logging

logger = logging.getLogger("deepytorch")


def once(level: int, message: str, *args: object) -> None:
    """Log `message` unless the same text was logged before in this process."""
    text = message % args if args else message
    if text not in _SEEN:
        _SEEN.add(text)
        logger.log(level, text)


_SEEN: set[str] = set()
