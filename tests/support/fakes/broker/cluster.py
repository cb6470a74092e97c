"""A broker's side of Fetch as bytes, and its cluster, for tests of the Fetch handler.

Reads, limits and errors are those of Kafka (docs/semantics.md 3.1). Sessions exist only as far as answers depend on
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.request import (
    FetchPartition,
    FetchRequest,
    parse_fetch_request,
)
from protocol.apis.topic_reference import TopicReference
from protocol.header import parse_request_header
from protocol.primitives import Buffer
from protocol.records.record_batch import iterate_batches
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds, LogRead


@dataclass
class LocalLog:
    """The broker's log of a partition. `batches` are contiguous up to the high watermark."""

    batches: list[bytes]
    log_start_offset: int = 0
    leader_epoch: int = 5
    error_code: int = 0
    last_stable_offset: int | None = None
    """The last stable offset. None: the high watermark."""
    epochs: Sequence[tuple[int, int]] = ()
    """The known leader epochs with their start offsets. Empty: the log begins in the current epoch."""

    @property
    def high_watermark(self) -> int:
        return next(iter(iterate_batches(self.batches[-1]))).next_offset if self.batches else self.log_start_offset

    @property
    def lso(self) -> int:
        return self.high_watermark if self.last_stable_offset is None else self.last_stable_offset

    def end_offset_for_epoch(self, leader_epoch: int) -> EpochEndOffset:
        """`LeaderEpochFileCache.endOffsetFor` (docs/semantics.md 6.1)."""
        if leader_epoch == self.leader_epoch:
            return EpochEndOffset(leader_epoch, self.high_watermark)
        known = self.epochs or ((self.leader_epoch, self.log_start_offset),)
        later = [start for epoch, start in known if epoch > leader_epoch]
        if not later:
            return EpochEndOffset(-1, -1)
        floor = max((epoch for epoch, _ in known if epoch <= leader_epoch), default=leader_epoch)
        return EpochEndOffset(floor, min(later))

    def read(self, offset: int, max_bytes: int, min_one: bool, is_read_committed: bool = False) -> bytes:
        out = b""
        for raw in self.batches:
            batch = next(iter(iterate_batches(raw)))
            if batch.last_offset < offset:
                continue
            if is_read_committed and batch.next_offset > self.lso:
                break
            if len(out) + len(raw) > max_bytes and (out or not min_one):
                break
            out += raw
        return out


@dataclass
class FakeCluster:
    """A cluster of one broker. Implements `ClusterTopology` and `LogSource` as well."""

    topics: dict[str, UUID] = field(default_factory=dict)
    logs: dict[TopicIdPartition, LocalLog] = field(default_factory=dict)
    lagging: dict[str, UUID] = field(default_factory=dict)
    """The ids of deleted topics that a broker still knows. `resolve_topic_id` asks that broker once."""
    is_reachable: bool = True
    requests: list[FetchRequest] = field(default_factory=list)
    bounds_asked: int = 0
    epochs_asked: list[tuple[TopicIdPartition, int]] = field(default_factory=list)
    next_session_id: int = 77
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """The test sets it when new local data should end a long poll."""
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    """The first long poll of the proxy itself sets it."""
    used: set[TopicReference] = field(default_factory=set)
    """The topics that `use_topic` noted."""

    def topic_id(self, name: str, max_age_ms: int | None = None) -> UUID | None:
        return self.topics.get(name)

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        if name in self.lagging:
            return self.lagging.pop(name)
        return self.topics.get(name)

    async def all_topic_ids(self, names: Collection[str], timeout_ms: int) -> Mapping[str, Collection[UUID]]:
        brokers = (await self.current_topic_ids(names, None, timeout_ms), self.lagging)
        return {name: {known[name] for known in brokers if name in known} for name in names}

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        if not self.is_reachable:
            raise BrokerError("the broker is gone", retriable=True)
        return {name: self.topics[name] for name in names if name in self.topics}

    def use_topic(self, topic: TopicReference) -> None:
        self.used.add(topic)

    def topic_name(self, topic_id: UUID) -> str | None:
        return next((name for name, known in self.topics.items() if known == topic_id), None)

    async def resolve_topic_name(self, topic_id: UUID, timeout_ms: int) -> str | None:
        if not self.is_reachable:
            raise BrokerError("the broker is gone", retriable=True)
        return self.topic_name(topic_id)

    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        self.bounds_asked += 1
        if not self.is_reachable:
            raise BrokerError("the broker is gone", retriable=True)
        log = self.logs[partition]
        return LocalLogBounds(log.log_start_offset, log.lso, log.high_watermark, log.leader_epoch)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return sum(map(len, self.logs[partition].batches))

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        log = self.logs[partition]
        records = log.read(offset, max_bytes, True, True)
        return LogRead(records, log.log_start_offset, log.lso, log.high_watermark, log.leader_epoch, ())

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        self.epochs_asked.append((partition, leader_epoch))
        if not self.is_reachable:
            raise BrokerError("the broker is gone", retriable=True)
        return self.logs[partition].end_offset_for_epoch(leader_epoch)

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        raise NotImplementedError

    def answer(self, frame: Buffer) -> bytes:
        header = parse_request_header(frame)
        request = parse_fetch_request(frame, header.body_position, header.api_version)
        self.requests.append(request)
        session_id = 0
        if request.version >= 7 and request.session_epoch == 0:
            session_id = self.next_session_id
        elif request.session_epoch > 0:
            session_id = request.session_id
        left = request.max_bytes
        min_one = True
        topics: list[tuple[TopicReference, list[Sequence[Buffer]]]] = []
        for topic in request.topics:
            entries: list[Sequence[Buffer]] = []
            for asked in request.partitions[topic.first_partition : topic.end_partition]:
                entry, size = self._read(request, asked, left, min_one)
                left = max(0, left - size)
                min_one = min_one and not size
                entries.append(entry)
            topics.append((topic.topic, entries))
        return b"".join(encode_response(request.version, header.correlation_id, topics, session_id=session_id))

    def log_of(self, topic: TopicReference, partition: int) -> LocalLog:
        topic_id = topic if isinstance(topic, UUID) else self.topics[topic]
        return self.logs[TopicIdPartition(topic_id, partition)]

    def _read(
        self, request: FetchRequest, asked: FetchPartition, left: int, min_one: bool
    ) -> tuple[Sequence[Buffer], int]:
        log = self.log_of(asked.topic, asked.partition)
        error_code = log.error_code
        if not error_code and 0 <= asked.current_leader_epoch < log.leader_epoch:
            error_code = 74
        if not error_code and not log.log_start_offset <= asked.fetch_offset <= log.high_watermark:
            error_code = 1
        if error_code:
            return encode_partition(request.version, asked.partition, error_code=error_code), 0
        max_bytes = min(asked.partition_max_bytes, left)
        records = log.read(asked.fetch_offset, max_bytes, min_one, request.is_read_committed)
        entry = encode_partition(
            request.version,
            asked.partition,
            high_watermark=log.high_watermark,
            last_stable_offset=log.lso,
            log_start_offset=log.log_start_offset,
            aborted_transactions=() if request.is_read_committed else None,
            records=(records,),
        )
        return entry, len(records)
