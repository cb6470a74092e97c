"""`__delete_failed_remote_log_segments`: the segments whose objects could not be deleted.

See docs/founding.md, "Failed deletions".

The topic has one partition and is compacted. The key is the segment's uuid as text and the value is JSON, so that any
consumer can read it. If a later deletion succeeds, a tombstone removes the record. The topic is created with the first
record. It only informs operators: the remote log metadata decides which segments are deleted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from uuid import UUID

from protocol.records.record_batch import verify_batches
from protocol.records.record_reader import read_records
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import RemoteLogMetadataError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.topic.metadata_producer import MetadataProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic, MetadataTopicSettings, open_metadata_topic
from tiers.model.ids import TopicIdPartition

FAILED_DELETIONS_TOPIC = "__delete_failed_remote_log_segments"
_READ_BYTES = 1 << 20
_LOOK_AGAIN_MS = 5_000


@dataclass(frozen=True, slots=True)
class FailedDeletion:
    """A deletion that failed. `attempts` counts the attempts of the process that wrote the record.

    The times are the wall clock of that process. The offsets are inclusive."""

    topic: str
    topic_id: str
    partition: int
    segment: str
    start_offset: int
    end_offset: int
    size_bytes: int
    attempts: int
    first_failed_at_ms: int
    last_failed_at_ms: int
    error: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, raw: bytes) -> FailedDeletion:
        """Raises `RemoteLogMetadataError`."""
        try:
            return cls(**json.loads(raw))
        except (ValueError, TypeError) as error:
            raise RemoteLogMetadataError(f"a failed deletion cannot be read: {error}") from error


class FailedDeletionsTopic:
    """Implements `FailedDeletionLog`."""

    def __init__(
        self,
        client: BrokerClient,
        timeout_ms: int,
        *,
        name: str = FAILED_DELETIONS_TOPIC,
        replication_factor: int | None = None,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._settings = MetadataTopicSettings(name, 1, replication_factor)
        self._clock_ms = clock_ms
        self._topic: MetadataTopic | None = None
        self._is_there = False
        self._look_again_at_ms = clock_ms()
        self._opening = asyncio.Lock()

    async def publish(self, failed: FailedDeletion) -> None:
        """Writes a failed deletion, and creates the topic if it is missing. Raises `RemoteLogError`."""
        await self._write(failed.segment, failed.encode())

    async def retract(self, segment: UUID) -> None:
        """Writes the tombstone of a segment, if the topic exists. Raises `RemoteLogError`."""
        now_ms = self._clock_ms()
        if not self._is_there and now_ms >= self._look_again_at_ms:
            # An earlier owner of the segment may have created the topic. But most tiers never have the topic, and every
            # expired segment passes here, so the brokers are asked only from time to time.
            metadata = await self._client.topic_named(self._settings.name, self._timeout_ms)
            self._is_there = self._settings.name in metadata.topics
            self._look_again_at_ms = now_ms + _LOOK_AGAIN_MS
        if self._is_there:
            await self._write(str(segment), None)

    async def _write(self, segment: str, value: bytes | None) -> None:
        async with self._opening:
            if self._topic is None:
                self._topic = await open_metadata_topic(self._client, self._settings, self._timeout_ms)
                self._is_there = True
        producer = MetadataProducer(self._client, self._topic)
        try:
            await producer.send(0, [(segment.encode(), value)], self._timeout_ms)
        except RemoteLogMetadataError:
            self._topic, self._is_there = None, False  # the topic may have been deleted since
            raise


async def read_failed_deletions(
    client: BrokerClient, timeout_ms: int, name: str = FAILED_DELETIONS_TOPIC
) -> list[FailedDeletion]:
    """Returns the current records, sorted by topic, partition and offset. Raises `RemoteLogError`.

    The list is empty if the topic does not exist."""
    topic = (await client.topic_named(name, timeout_ms)).topics.get(name)
    if topic is None:
        return []
    source, partition = BrokerLogSource(client), TopicIdPartition(topic.topic_id, 0, name)
    bounds = await source.bounds(partition, timeout_ms)
    position, found = bounds.log_start_offset, dict[bytes, FailedDeletion]()
    while position < bounds.last_stable_offset:
        records = (await source.read(partition, position, _READ_BYTES, timeout_ms)).records
        if not records:
            break
        for batch in verify_batches(records):
            position = batch.next_offset
            for record in () if batch.is_control else read_records(records, batch):
                key = bytes(record.key or b"")
                found.pop(key, None)
                if record.value is not None:
                    found[key] = FailedDeletion.decode(bytes(record.value))
    return sorted(found.values(), key=lambda each: (each.topic, each.topic_id, each.partition, each.start_offset))
