"""The reference to a topic in Fetch: the name up to version 12, the topic id from version 13 on (KIP-516)."""

from __future__ import annotations

from functools import lru_cache
from uuid import UUID

from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import Buffer, read_string, write_string

TopicReference = str | UUID

TOPIC_ID_FROM = 13
"""The first version of Fetch that has topic ids instead of names."""


@lru_cache(maxsize=4096)
def _uuid(raw: bytes) -> UUID:
    return UUID(bytes=raw)


def read_topic_reference(buf: Buffer, pos: int, version: int) -> tuple[TopicReference, int]:
    """Reads the topic as Fetch requests and responses of that version name it."""
    if version >= TOPIC_ID_FROM:
        end = pos + 16
        if end > len(buf):
            raise TruncatedError(f"a topic id at {pos} exceeds the message of {len(buf)} bytes")
        return _uuid(bytes(buf[pos:end])), end
    return read_topic_name(buf, pos, version >= 12)


def read_topic_name(buf: Buffer, pos: int, compact: bool) -> tuple[str, int]:
    name, pos = read_string(buf, pos, compact)
    if name is None:
        raise ProtocolError(f"the topic that ends at {pos} is without a name")
    return name, pos


def write_topic_reference(topic: TopicReference, version: int) -> bytes:
    if isinstance(topic, UUID) is not (version >= TOPIC_ID_FROM):
        raise ValueError(f"Fetch version {version} does not name a topic by {type(topic).__name__}")
    return topic.bytes if isinstance(topic, UUID) else write_string(topic, version >= 12)
