"""Encodes Fetch requests of any version, without the code under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import FLEXIBLE_FROM
from protocol.apis.topic_reference import TOPIC_ID_FROM, TopicReference, write_topic_reference
from protocol.header import build_request_header
from protocol.primitives import INT8, INT32, INT64, write_array_length, write_string


@dataclass(frozen=True)
class Ask:
    """One partition of a request."""

    topic: TopicReference
    partition: int
    offset: int
    max_bytes: int = 1 << 20
    leader_epoch: int = -1
    last_fetched_epoch: int = -1


def fetch_frame(
    version: int,
    asks: Sequence[Ask],
    *,
    max_wait_ms: int = 50,
    min_bytes: int = 1,
    max_bytes: int = 50 << 20,
    isolation_level: int = 0,
    session_id: int = 0,
    session_epoch: int = -1,
    replica_id: int = -1,
    correlation_id: int = 9,
    forgotten: Sequence[tuple[TopicReference, Sequence[int]]] = (),
    rack_id: str = "",
) -> bytes:
    """Returns a request frame. Consecutive asks for the same topic share one topic entry."""
    compact = version >= FLEXIBLE_FROM
    tags = b"\x00" if compact else b""
    out = bytearray(build_request_header(ApiKey.FETCH, version, correlation_id, "test"))
    if version < 15:
        out += INT32.pack(replica_id)
    out += INT32.pack(max_wait_ms) + INT32.pack(min_bytes) + INT32.pack(max_bytes) + INT8.pack(isolation_level)
    if version >= 7:
        out += INT32.pack(session_id) + INT32.pack(session_epoch)
    runs: list[list[Ask]] = []
    for ask in asks:
        if runs and runs[-1][0].topic == ask.topic:
            runs[-1].append(ask)
        else:
            runs.append([ask])
    out += write_array_length(len(runs), compact)
    for run in runs:
        out += write_topic_reference(run[0].topic, version)
        out += write_array_length(len(run), compact)
        for ask in run:
            out += INT32.pack(ask.partition)
            out += INT32.pack(ask.leader_epoch) if version >= 9 else b""
            out += INT64.pack(ask.offset)
            out += INT32.pack(ask.last_fetched_epoch) if version >= 12 else b""
            out += INT64.pack(-1) if version >= 5 else b""
            out += INT32.pack(ask.max_bytes) + tags
        out += tags
    if version >= 7:
        out += write_array_length(len(forgotten), compact)
        for topic, partitions in forgotten:
            out += write_topic_reference(topic, version) + write_array_length(len(partitions), compact)
            out += b"".join(map(INT32.pack, partitions)) + tags
    if version >= 11:
        out += write_string(rack_id, compact)
    if version >= 15 and replica_id >= 0:
        out += b"\x01\x01\x0d" + INT32.pack(replica_id) + INT64.pack(1) + b"\x00"
    else:
        out += tags
    return bytes(out)


def reference(version: int, name: str, topic_id: UUID) -> TopicReference:
    return topic_id if version >= TOPIC_ID_FROM else name
