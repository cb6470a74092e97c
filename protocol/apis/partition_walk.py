"""The walk that ListOffsets, OffsetForLeaderEpoch and DeleteRecords share: topics by name, partitions of one size.

A partition's fields never change their size, so an answer is patched in place and nothing else is touched.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import NamedTuple

from protocol.apis.topic_reference import read_topic_name
from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import Buffer, read_array_length, skip_tagged_section


class WalkedPartition(NamedTuple):
    topic: str
    position: int
    """Of the partition's first field; the others follow as the layout says."""
    fields: tuple[int, ...]


def walk_partitions(buf: Buffer, pos: int, layout: Struct, compact: bool) -> tuple[list[WalkedPartition], int]:
    """Every partition of the array of topics at `pos`, in wire order, and where the array ends."""
    partitions: list[WalkedPartition] = []
    size = layout.size
    try:
        topic_count, pos = read_array_length(buf, pos, compact)
        for _ in range(topic_count):
            topic, pos = read_topic_name(buf, pos, compact)
            partition_count, pos = read_array_length(buf, pos, compact)
            for _ in range(partition_count):
                partitions.append(WalkedPartition(topic, pos, layout.unpack_from(buf, pos)))
                pos += size
                if compact:
                    pos = skip_tagged_section(buf, pos)
            if compact:
                pos = skip_tagged_section(buf, pos)
    except struct.error as error:
        raise TruncatedError(f"a partition at {pos} of {len(buf)} bytes") from error
    return partitions, pos


def check_end(buf: Buffer, pos: int, compact: bool) -> None:
    """After the last field only the message's own tagged section may follow. Raises `ProtocolError`."""
    if compact:
        pos = skip_tagged_section(buf, pos)
    if pos != len(buf):
        raise ProtocolError(f"the message ends at {pos} of {len(buf)} bytes")
