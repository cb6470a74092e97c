"""A fast scan of Fetch responses. Most responses hold no error, and then the proxy needs only their topics.

The scan is about four times as fast as a walk, because it keeps nothing of a partition. When the scan is in doubt, or
the bytes are malformed, it returns None and the caller walks the response instead.
"""

from __future__ import annotations

import struct
from struct import Struct

from protocol.apis.fetch.request import FLEXIBLE_FROM
from protocol.apis.fetch.response import LOG_START_OFFSET_FROM, PREFERRED_READ_REPLICA_FROM, SESSION_FROM
from protocol.apis.topic_reference import TopicReference, read_topic_reference
from protocol.errors import ProtocolError
from protocol.primitives import INT32, Buffer, read_array_length, read_uvarint

_TOP_V7 = Struct(">4xh4x")
# The fields: error code, number of aborted transactions, length of records. In the flexible layout, the number and the
# length are uvarints, which take one byte when the value is below 128.
_ENTRY_V4 = Struct(">4xh16xii")
_ENTRY_V5 = Struct(">4xh24xii")
_ENTRY_V11 = Struct(">4xh24xi4xi")
_ENTRY_V12 = Struct(">4xh24xB4xB")


def plain_topics(payload: Buffer, body_position: int, version: int) -> list[TopicReference] | None:
    """Returns the topics of a response without errors, aborted transactions and tagged fields.

    Returns None for every other response, even if it needs no change.
    """
    try:
        return _scan(payload, body_position, version)
    except (ProtocolError, IndexError, struct.error):
        return None


def _scan(payload: Buffer, pos: int, version: int) -> list[TopicReference] | None:
    compact = version >= FLEXIBLE_FROM
    if version >= SESSION_FROM:
        if _TOP_V7.unpack_from(payload, pos)[0]:
            return None
        pos += _TOP_V7.size
    else:
        pos += INT32.size
    topics: list[TopicReference] = []
    topic_count, pos = read_array_length(payload, pos, compact)
    for _ in range(topic_count):
        topic, pos = read_topic_reference(payload, pos, version)
        topics.append(topic)
        count, pos = read_array_length(payload, pos, compact)
        end = _scan_flexible(payload, pos, count) if compact else _scan_classic(payload, pos, count, version)
        if end is None or (compact and payload[end]):
            return None
        pos = end + compact
    if compact:
        if payload[pos]:
            return None
        pos += 1
    return topics if pos == len(payload) else None


def _scan_flexible(payload: Buffer, pos: int, count: int) -> int | None:
    unpack = _ENTRY_V12.unpack_from
    size = _ENTRY_V12.size
    for _ in range(count):
        error_code, aborted, records = unpack(payload, pos)
        if error_code or aborted > 1:
            return None
        pos += size
        if records > 0x7F:
            records, pos = read_uvarint(payload, pos - 1)
        if records:
            pos += records - 1
        if payload[pos]:
            return None
        pos += 1
    return pos


def _scan_classic(payload: Buffer, pos: int, count: int, version: int) -> int | None:
    if version >= PREFERRED_READ_REPLICA_FROM:
        entry = _ENTRY_V11
    else:
        entry = _ENTRY_V5 if version >= LOG_START_OFFSET_FROM else _ENTRY_V4
    unpack = entry.unpack_from
    size = entry.size
    for _ in range(count):
        error_code, aborted, records = unpack(payload, pos)
        if error_code or not -1 <= aborted <= 0 or records < -1:
            return None
        pos += size + max(records, 0)
    return pos
