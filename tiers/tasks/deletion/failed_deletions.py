"""Retries failed deletions, and publishes them for operators in `__delete_failed_remote_log_segments`.

Each segment has its own backoff, so that an object that cannot be deleted does not cost a request in every round. After
`publish_after` attempts the failure is published. A later success retracts that record. The attempts are those of this
process: after a restart the count begins again, and a published record stays until the deletion succeeds.

The topic has one partition and is compacted (docs/founding.md, "Failed deletions"). The key is the segment's uuid as
text and the value is JSON, so that any consumer can read it. The topic is created with the first record. It only
informs operators: the remote log metadata decides which segments are deleted.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol
from uuid import UUID

from protocol.records.record_batch import verify_batches
from protocol.records.record_reader import read_records
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteLogError, RemoteLogMetadataError, RemoteStorageError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.topic.metadata_producer import MetadataProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic, MetadataTopicSettings, open_metadata_topic
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata

FAILED_DELETIONS_TOPIC = "__delete_failed_remote_log_segments"
_READ_BYTES = 1 << 20
_LOOK_AGAIN_MS = 5_000
_PUBLISH_AFTER = RemoteLogConfig().delete_attempts
_BACKOFF = Backoff(base_ms=30_000, cap_ms=3_600_000)
_KEPT = 100_000
logger = logging.getLogger(__name__)


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


class FailedDeletionLog(Protocol):
    async def publish(self, failed: FailedDeletion) -> None: ...

    async def retract(self, segment: UUID) -> None:
        """Retracts the published record of a segment, whichever process wrote it. Does nothing without a record."""


class _Failure(NamedTuple):
    attempts: int
    due_ms: int
    first_failed_at_ms: int


class FailedDeletions:
    def __init__(self, log: FailedDeletionLog | None = None, *, publish_after: int = _PUBLISH_AFTER) -> None:
        self._log = log
        self._publish_after = publish_after
        self._failures: dict[RemoteLogSegmentId, _Failure] = {}

    @property
    def count(self) -> int:
        """The number of segments whose last deletion failed."""
        return len(self._failures)

    def is_due(self, segment_id: RemoteLogSegmentId, clock_ms: int) -> bool:
        """Whether the deletion may be tried: it never failed in this process, or its backoff has passed."""
        failure = self._failures.get(segment_id)
        return failure is None or clock_ms >= failure.due_ms

    async def failed(
        self, segment: RemoteLogSegmentMetadata, error: RemoteStorageError, clock_ms: int, wall_clock_ms: int
    ) -> None:
        """Notes a failed attempt, and publishes it if it is due. Does not raise when the topic cannot be written."""
        known = self._failures.pop(segment.segment_id, _Failure(0, 0, wall_clock_ms))
        attempts = known.attempts + 1
        pause_ms = _BACKOFF.most_ms(attempts)
        self._failures[segment.segment_id] = _Failure(attempts, clock_ms + pause_ms, known.first_failed_at_ms)
        if len(self._failures) > _KEPT:
            del self._failures[next(iter(self._failures))]
        partition = segment.topic_id_partition
        fields = {"partition": str(partition), "segment": str(segment.segment_id.id), "error": str(error)}
        logger.warning("a segment could not be deleted", extra={**fields, "attempts": attempts, "pause_ms": pause_ms})
        if self._log is None or attempts < self._publish_after:
            return
        failed = FailedDeletion(
            topic=partition.topic,
            topic_id=str(partition.topic_id),
            partition=partition.partition,
            segment=str(segment.segment_id.id),
            start_offset=segment.start_offset,
            end_offset=segment.end_offset,
            size_bytes=segment.segment_size_bytes,
            attempts=attempts,
            first_failed_at_ms=known.first_failed_at_ms,
            last_failed_at_ms=wall_clock_ms,
            error=str(error),
        )
        try:
            await self._log.publish(failed)
        except RemoteLogError as trouble:
            logger.warning("a failed deletion could not be published", extra={**fields, "error": str(trouble)})

    async def deleted(self, segment_id: RemoteLogSegmentId) -> None:
        """Forgets a failure, since the objects are gone. Raises `RemoteLogError` when the retraction fails."""
        if self._log is not None:
            await self._log.retract(segment_id.id)
        self._failures.pop(segment_id, None)

    def forget_unless(self, is_ours: Callable[[TopicIdPartition], bool]) -> None:
        """Forgets the failures of other owners' partitions: those owners count and retry them now."""
        owned = {partition: is_ours(partition) for partition in {each.topic_id_partition for each in self._failures}}
        self._failures = {each: one for each, one in self._failures.items() if owned[each.topic_id_partition]}


class FailedDeletionsTopic:
    """Implements `FailedDeletionLog`."""

    def __init__(
        self,
        client: BrokerClient,
        timeout_ms: int,
        *,
        replication_factor: int | None = None,
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._client = client
        self._timeout_ms = timeout_ms
        self._settings = MetadataTopicSettings(FAILED_DELETIONS_TOPIC, 1, replication_factor)
        self._clock_ms = clock_ms
        self._topic: MetadataTopic | None = None
        self._look_again_at_ms = clock_ms()
        self._opening = asyncio.Lock()

    async def publish(self, failed: FailedDeletion) -> None:
        """Writes a failed deletion, and creates the topic if it is missing. Raises `RemoteLogError`."""
        await self._write(failed.segment, failed.encode())

    async def retract(self, segment: UUID) -> None:
        """Writes the tombstone of a segment, if the topic exists. Raises `RemoteLogError`."""
        if self._topic is None:
            # An earlier owner of the segment may have created the topic. But most tiers never have the topic, and every
            # expired segment passes here, so the brokers are asked only from time to time.
            now_ms = self._clock_ms()
            if now_ms < self._look_again_at_ms:
                return
            metadata = await self._client.topic_named(FAILED_DELETIONS_TOPIC, self._timeout_ms)
            if FAILED_DELETIONS_TOPIC not in metadata.topics:
                self._look_again_at_ms = now_ms + _LOOK_AGAIN_MS
                return
        await self._write(str(segment), None)

    async def _write(self, segment: str, value: bytes | None) -> None:
        async with self._opening:
            if self._topic is None:
                self._topic = await open_metadata_topic(self._client, self._settings, self._timeout_ms)
        producer = MetadataProducer(self._client, self._topic)
        try:
            await producer.send(0, [(segment.encode(), value)], self._timeout_ms)
        except RemoteLogMetadataError:
            self._topic, self._look_again_at_ms = None, 0  # the topic may have been deleted since
            raise


async def read_failed_deletions(client: BrokerClient, timeout_ms: int) -> list[FailedDeletion]:
    """Returns the current records, sorted by topic, partition and offset. Raises `RemoteLogError`.

    The list is empty if the topic does not exist."""
    topic = (await client.topic_named(FAILED_DELETIONS_TOPIC, timeout_ms)).topics.get(FAILED_DELETIONS_TOPIC)
    if topic is None:
        return []
    source, partition = BrokerLogSource(client), TopicIdPartition(topic.topic_id, 0, FAILED_DELETIONS_TOPIC)
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
