"""Replaces byte ranges of a message. All other bytes survive verbatim, unknown tags included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from protocol.primitives import Buffer
from protocol.steps import Stepped, Steps


class Splice(NamedTuple):
    """Replaces `[start, end)` by `replacement`; an empty range inserts `replacement` at `start`."""

    start: int
    end: int
    replacement: bytes


@Stepped
def splice(buf: Buffer, splices: Iterable[Splice]) -> Steps[bytes]:
    """Returns a copy of `buf` with every splice applied.

    Raises `ValueError` unless the splices are in ascending order, do not overlap and lie within `buf`.
    """
    view = memoryview(buf)
    parts: list[Buffer] = []
    pos = 0
    for start, end, replacement in splices:
        if start < pos or end < start or end > len(view):
            raise ValueError(
                f"the splice [{start}, {end}) overlaps the one that ends at {pos} or exceeds {len(view)} bytes"
            )
        parts.append(view[pos:start])
        parts.append(replacement)
        pos = end
        yield
    parts.append(view[pos:])
    return b"".join(parts)
