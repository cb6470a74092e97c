"""Shell patterns for topics in the settings. A pattern that can match no topic is an error."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from string import ascii_letters, digits
from typing import Annotated, Final

from pydantic import AfterValidator

_LEGAL: Final = f"{ascii_letters}{digits}._-"
_MAX_LENGTH: Final = 249
_PARTS: Final = re.compile(r"\[!?\]?[^]]*]|.", re.DOTALL)
"""A set of characters as `fnmatch` reads it, or one character."""


def check_pattern(value: str) -> str:
    """Raises `ValueError` if no topic can have a name that matches."""
    parts = _PARTS.findall(value)
    is_possible = all(any(fnmatchcase(each, part) for each in _LEGAL) for part in parts)
    is_too_long = len(parts) - parts.count("*") > _MAX_LENGTH
    if not is_possible or is_too_long or value in ("", ".", ".."):
        raise ValueError(
            f"{value!r} matches no topic: a topic name has letters, digits, '.', '_' and '-', and a pattern also has"
            " *, ?, [abc] and [!abc]"
        )
    return value


TopicPattern = Annotated[str, AfterValidator(check_pattern)]
