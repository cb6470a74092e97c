"""Replacing byte ranges of a message: whatever a patch does not name survives verbatim, unknown tags included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from protocol.primitives import Buffer


class Splice(NamedTuple):
    """Replace `[start, end)` by `replacement`; an empty range inserts."""

    start: int
    end: int
    replacement: bytes


def splice(buf: Buffer, splices: Iterable[Splice]) -> bytes:
    """`buf` with every splice applied; they must be in ascending order and must not overlap."""
    view = memoryview(buf)
    parts: list[Buffer] = []
    pos = 0
    for start, end, replacement in splices:
        if start < pos or end < start or end > len(view):
            raise ValueError(f"splice [{start}, {end}) overlaps what ends at {pos} or leaves {len(view)} bytes")
        parts.append(view[pos:start])
        parts.append(replacement)
        pos = end
    parts.append(view[pos:])
    return b"".join(parts)
