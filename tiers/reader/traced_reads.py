"""The reads of the remote tier as spans: the read of a partition, and the calls of the store that it leads to.

A proxy wraps its reader and its store only if there is a tracer. The process that wants records begins the span of a
read (`TracedReads`). The process that reads the store may be another one. The request names the span there
(`ContinuedReads`), so that each call of the store is its child (`TracedStore`). A download that several reads wait for
is a child of the read that began it.
"""

from __future__ import annotations

from dataclasses import replace

from tiers.errors import RemoteLogError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteOffsets, RemoteReads
from tiers.storage.remote_storage_manager import SegmentReads
from tiers.tracing import (
    PartitionRead,
    RecordsRead,
    StoreAnswered,
    StoreRead,
    Tracer,
    current_context,
    in_trace,
    spanned,
)


class ContinuedReads:
    """Implements `RemoteReads`: what a read leads to is part of the work that the request names."""

    def __init__(self, inner: RemoteReads) -> None:
        self._inner = inner

    @property
    def offsets(self) -> RemoteOffsets:
        return self._inner.offsets

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        with in_trace(request.trace):
            return await self._inner.read(request)

    async def leader_epochs(
        self, partition: TopicIdPartition, *, deadline_ms: int, connection_id: int
    ) -> tuple[LeaderEpochEntry, ...]:
        return await self._inner.leader_epochs(partition, deadline_ms=deadline_ms, connection_id=connection_id)


class TracedReads(ContinuedReads):
    """Implements `RemoteReads`: a read whose request names a trace has a span.

    `metadata` has the names of topics: clients name a topic by its id."""

    def __init__(self, inner: RemoteReads, tracer: Tracer, metadata: RemoteLogMetadataState) -> None:
        super().__init__(inner)
        self._tracer = tracer
        self._metadata = metadata

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        if not request.trace:
            return await self._inner.read(request)
        partition = request.partition
        topic = partition.topic or self._topic_name(partition, request.offset)
        work = PartitionRead(topic, partition.topic_id, partition.partition, request.offset, request.max_bytes)
        with spanned(self._tracer.child_of(request.trace, work)) as span:
            read = await super().read(replace(request, trace=span.context))
            span.found(RecordsRead(read.segment_id, read.size_bytes, read.is_cache_hit))
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
        context = current_context()
        if not context:
            return await self._inner.fetch_log_segment(metadata, start_position, end_position)
        work = _work("fetch_log_segment", metadata, start_position, end_position)
        with spanned(self._tracer.child_of(context, work)) as span:
            view = await self._inner.fetch_log_segment(metadata, start_position, end_position)
            span.found(StoreAnswered(len(view)))
            return view

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        context = current_context()
        if not context:
            return await self._inner.fetch_indexes(metadata)
        with spanned(self._tracer.child_of(context, _work("fetch_indexes", metadata))) as span:
            data = await self._inner.fetch_indexes(metadata)
            span.found(StoreAnswered(len(data)))
            return data


def _work(
    operation: str,
    metadata: RemoteLogSegmentMetadata,
    start_position: int | None = None,
    end_position: int | None = None,
) -> StoreRead:
    partition = metadata.topic_id_partition
    segment_id = metadata.segment_id.id
    return StoreRead(operation, partition.topic, partition.partition, segment_id, start_position, end_position)
