"""Shell patterns for topics in the settings. A pattern that can match no topic is an error."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_LEGAL = "A-Za-z0-9._-"
_PATTERN = re.compile(rf"(?:[*?{_LEGAL}]|\[!?[{_LEGAL}]+\])+")


def check_pattern(value: str) -> str:
    """Raises `ValueError` for a character that no topic name has, unless it is a wildcard."""
    if _PATTERN.fullmatch(value) is None:
        raise ValueError(
            f"{value!r} matches no topic: a topic name has letters, digits, '.', '_' and '-', and a pattern also has"
            " *, ?, [abc] and [!abc]"
        )
    return value


TopicPattern = Annotated[str, AfterValidator(check_pattern)]
