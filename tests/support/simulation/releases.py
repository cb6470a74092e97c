"""A later release: it writes and reads a record type that release 1 does not know, and that no reader may ignore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from protocol.primitives import write_uvarint
from tests.support.simulation.loop import current_process
from tiers.errors import RemoteLogError
from tiers.metadata.metadata_log import Append
from tiers.metadata.records import serde
from tiers.metadata.records.serde import KeyAndValue, RecordKey, RecordType, encode_key
from tiers.metadata.state import replay, writer
from tiers.metadata.topic.group import membership
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition

NEW_TYPE = RecordType(1900, 0)
_VALUE = write_uvarint(1) + write_uvarint(NEW_TYPE.api_key) + write_uvarint(NEW_TYPE.version)


def _is_new() -> bool:
    process: Any = current_process.get()
    return process is not None and process.release >= 2


@contextmanager
def several_releases() -> Iterator[None]:
    """Within it, a process knows the record types of its release."""
    known, decode, opened = serde.known_record_types, serde.decode_value, TopicBasedMetadataLog.open

    def known_record_types() -> frozenset[RecordType]:
        return known() | {NEW_TYPE} if _is_new() else known()

    def decode_value(buf: Any) -> Any:
        process = current_process.get()
        if bytes(buf) == _VALUE and (process is None or _is_new()):
            return None  # what it says does not matter here
        return decode(buf)

    async def open_manager(self: TopicBasedMetadataLog) -> None:
        process: Any = current_process.get()
        process.metadata = self
        await opened(self)

    patches: list[tuple[Any, str, Any]] = [
        (membership, "known_record_types", known_record_types),
        (writer, "known_record_types", known_record_types),
        (replay, "decode_value", decode_value),
        (TopicBasedMetadataLog, "open", open_manager),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        yield


async def write_new_record(metadata: TopicBasedMetadataLog, partition: TopicIdPartition) -> bool:
    """Writes a record of the later release as the partition's owner. Returns whether it was written."""
    record: KeyAndValue = encode_key(RecordKey(NEW_TYPE.api_key, partition, b"new")), _VALUE
    with contextlib.suppress(RemoteLogError):
        await metadata.append(partition, lambda: [record], Append.AS_OWNER)
        return True
    return False
