"""The walk that ListOffsets, OffsetForLeaderEpoch and DeleteRecords share: topics by name, partitions of fixed size.

Since a partition's fields have a fixed size, an answer can be patched in place without touching any other byte.
"""

from __future__ import annotations

import struct
import sys
from struct import Struct
from typing import NamedTuple

from protocol.apis.topic_reference import read_topic_name
from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import MAX_ITEMS, Buffer, check_items, read_array_length, skip_tagged_section, skip_tags
from protocol.steps import Steps


class WalkedPartition(NamedTuple):
    topic: str
    position: int
    """The position of the partition's first field. The other fields follow in the order of the layout."""
    fields: tuple[int, ...]


def walk_request(buf: Buffer, pos: int, layout: Struct, compact: bool) -> Steps[tuple[list[WalkedPartition], int]]:
    """Does as `walk_partitions` in a request. Raises `LimitExceededError` above `MAX_ITEMS`."""
    return (yield from walk_partitions(buf, pos, layout, compact, MAX_ITEMS))


def walk_partitions(
    buf: Buffer, pos: int, layout: Struct, compact: bool, max_items: int = sys.maxsize
) -> Steps[tuple[list[WalkedPartition], int]]:
    """Returns every partition in the array of topics at `pos`, in wire order, and the end of the array."""
    partitions: list[WalkedPartition] = []
    size = layout.size
    try:
        topic_count, pos = read_array_length(buf, pos, compact)
        for _ in range(topic_count):
            topic, pos = read_topic_name(buf, pos, compact)
            partition_count, pos = read_array_length(buf, pos, compact)
            check_items(topic_count + len(partitions) + partition_count, max_items)
            for _ in range(partition_count):
                partitions.append(WalkedPartition(topic, pos, layout.unpack_from(buf, pos)))
                pos += size
                if compact:
                    pos = yield from skip_tags(buf, pos)
                yield
            if compact:
                pos = yield from skip_tags(buf, pos)
            yield
    except struct.error as error:
        raise TruncatedError(f"a partition at {pos} exceeds the message of {len(buf)} bytes") from error
    return partitions, pos


def read_end(buf: Buffer, pos: int, compact: bool) -> int:
    """Returns the end of the message, after its own tagged section in flexible versions.

    A broker ignores what follows the end of a request, so its readers do, too (docs/semantics.md 1.1)."""
    return skip_tagged_section(buf, pos) if compact else pos


def check_end(buf: Buffer, pos: int, compact: bool) -> None:
    """Raises `ProtocolError` unless the message ends at `pos`, after its own tagged section in flexible versions."""
    end = read_end(buf, pos, compact)
    if end != len(buf):
        raise ProtocolError(f"the message ends at {end}, but the payload has {len(buf)} bytes")
