"""`RemoteReads`: what a proxy asks of the remote tier, whichever process reads it; and these reads as spans.

A proxy wraps its reader and its store only if there is a tracer. The process that wants records begins the span of a
read (`TracedReads`), and the request names it. So each call of the store, also in another process, is its child
(`TracedStore`). A download that several reads wait for is a child of the read that began it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol, TypeVar

from opentelemetry.trace import SpanKind, Tracer

from tiers.errors import RemoteLogError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_offset_reader import TimestampOffset
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.storage.remote_storage_manager import SegmentReads
from tiers.tracing import current_trace, partition_attributes, spanned, traceparent, within_named

T = TypeVar("T", memoryview, bytes)


class RemoteReads(Protocol):
    """The contract is that of `RemoteLogReader`."""

    async def read(self, request: RemoteReadRequest) -> RemoteRead: ...

    async def leader_epochs(self, partition: TopicIdPartition, caller: Caller) -> tuple[LeaderEpochEntry, ...]: ...

    async def offset_for_timestamp(
        self, partition: TopicIdPartition, timestamp_ms: int, from_offset: int, to_offset: int, caller: Caller
    ) -> TimestampOffset | None: ...

    async def max_timestamp(
        self, partition: TopicIdPartition, from_offset: int, to_offset: int, caller: Caller
    ) -> TimestampOffset | None: ...


class TracedReads:
    """Implements `RemoteReads`: a read whose request names a trace has a span.

    `metadata` has the names of topics: clients name a topic by its id."""

    def __init__(self, inner: RemoteReads, tracer: Tracer, metadata: RemoteLogMetadataState) -> None:
        self._inner = inner
        self._tracer = tracer
        self._metadata = metadata
        self.leader_epochs = inner.leader_epochs
        self.offset_for_timestamp = inner.offset_for_timestamp
        self.max_timestamp = inner.max_timestamp

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        if not request.trace:
            return await self._inner.read(request)
        partition = request.partition
        topic = partition.topic or self._topic_name(partition, request.offset)
        attributes: dict[str, str | int] = {
            **partition_attributes(topic, partition.partition),
            "messaging.kafka.offset": request.offset,
            "tidegate.topic.id": str(partition.topic_id),
            "tidegate.read.max_bytes": request.max_bytes,
        }
        name = f"read {topic}".rstrip()
        with spanned(self._tracer.start_span(name, within_named(request.trace), attributes=attributes)) as span:
            read = await self._inner.read(replace(request, trace=traceparent(span)))
            segment = {} if read.segment_id is None else {"tidegate.segment.id": str(read.segment_id)}
            cache = "hit" if read.is_cache_hit else "miss"
            span.set_attributes({**segment, "tidegate.read.bytes": read.size_bytes, "tidegate.chunk_cache": cache})
            return read

    def _topic_name(self, partition: TopicIdPartition, offset: int) -> str:
        """Returns the name in the metadata of the segment that holds the offset; "" if there is none."""
        try:
            segment = self._metadata.remote_log_segment_metadata(partition, offset)
        except RemoteLogError:  # the read reports it
            return ""
        return "" if segment is None else segment.topic_id_partition.topic


class TracedStore:
    """Implements `SegmentReads`: each call that is part of a trace has a span."""

    def __init__(self, inner: SegmentReads, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        read = self._inner.fetch_log_segment(metadata, start_position, end_position)
        return await self._traced(read, "fetch_log_segment", metadata, start_position, end_position)

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return await self._traced(self._inner.fetch_indexes(metadata), "fetch_indexes", metadata)

    async def _traced(
        self,
        read: Awaitable[T],
        operation: str,
        metadata: RemoteLogSegmentMetadata,
        start_position: int | None = None,
        end_position: int | None = None,
    ) -> T:
        if not (trace := current_trace()):
            return await read
        places = {"start_position": start_position, "end_position": end_position}
        attributes: dict[str, str | int] = {
            **partition_attributes(metadata.topic_id_partition.topic, metadata.topic_id_partition.partition),
            "tidegate.segment.id": str(metadata.segment_id.id),
            **{f"tidegate.store.{name}": place for name, place in places.items() if place is not None},
        }
        span = self._tracer.start_span(operation, within_named(trace), SpanKind.CLIENT, attributes)
        with spanned(span):
            data = await read
            span.set_attribute("tidegate.store.bytes", len(data))
            return data
