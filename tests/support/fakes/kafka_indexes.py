"""Reads Kafka's two index files as Kafka does (docs/semantics.md 10)."""

from __future__ import annotations

from struct import iter_unpack


def offset_index_entries(base_offset: int, data: bytes | memoryview) -> list[tuple[int, int]]:
    """Returns the last offset of each indexed batch, and the batch's position."""
    return [(base_offset + relative, position) for relative, position in iter_unpack(">ii", data)]


def time_index_entries(base_offset: int, data: bytes | memoryview) -> list[tuple[int, int]]:
    """Returns each new maximum timestamp (ms), and the last offset of its batch."""
    return [(timestamp_ms, base_offset + relative) for timestamp_ms, relative in iter_unpack(">qi", data)]
