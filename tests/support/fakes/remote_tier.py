"""A remote tier of real parts: the builder's segments in a directory, with their metadata in memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.record_batches import batch_of
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import (
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
)
from tiers.segment.segment_builder import Carried, SegmentBuilder
from tiers.storage.local import LocalRemoteStorageManager

TOPIC_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")


class RemoteTier:
    """`chunk_bytes` is the chunk size of the builder. It is small, so that few batches make many chunks."""

    def __init__(self, root: Path, chunk_bytes: int = 1000) -> None:
        store = root / "store"
        store.mkdir()
        self.storage = FaultyStorage(LocalRemoteStorageManager({"path": str(store), "cluster.id": "test"}))
        self.rlmm = InMemoryRemoteLogMetadataManager()
        self._root = root
        self._is_open = False
        self._chunk_bytes = chunk_bytes
        self.carried: dict[TopicIdPartition, Carried] = {}
        """What the next segment takes over."""

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.rlmm.state

    async def add(
        self,
        partition: TopicIdPartition,
        batches: Sequence[bytes],
        base_offset: int,
        aborted: Sequence[AbortedTransaction] = (),
        *,
        is_behind_gap: bool = False,
    ) -> RemoteLogSegmentMetadata:
        """Adds a finished segment. If it lies behind a gap, it continues no open transaction from before the gap.

        Such a transaction may have ended in the gap."""
        if is_behind_gap:
            self.carried[partition] = Carried(self.carried[partition].leader_epochs)
        if not self._is_open:
            await self.storage.open()
            self._is_open = True
        segment_id = RemoteLogSegmentId(partition, uuid.uuid4())
        builder = SegmentBuilder(
            self._root / f"{segment_id.id}.spool",
            base_offset,
            self.carried.get(partition, Carried()),
            self._chunk_bytes,
        )
        builder.append(b"".join(batches), aborted)
        built = builder.finish()
        self.carried[partition] = Carried.behind(built.indexes)
        metadata = RemoteLogSegmentMetadata(
            segment_id,
            built.start_offset,
            built.end_offset,
            broker_id=0,
            max_timestamp_ms=built.max_timestamp_ms,
            event_timestamp_ms=0,
            segment_leader_epochs=built.segment_leader_epochs,
            segment_size_bytes=built.size_bytes,
            state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
            txn_index_empty=built.txn_index_empty,
        )
        await self.rlmm.add_remote_log_segment_metadata(metadata)
        await self.storage.copy_log_segment_data(metadata, built.log_segment_data(metadata))
        builder.discard()
        await self.move(metadata, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        return metadata

    async def move(self, metadata: RemoteLogSegmentMetadata, state: RemoteLogSegmentState) -> None:
        await self.rlmm.update_remote_log_segment_metadata(
            RemoteLogSegmentMetadataUpdate(metadata.segment_id, 0, 0, state)
        )

    async def fill(
        self, partition: TopicIdPartition, *, segments: int, batches: int, records: int = 10, value_bytes: int = 20
    ) -> list[bytes]:
        """Adds contiguous segments from offset 0 on. Returns the batches of all segments, in order."""
        made: list[bytes] = []
        offset = 0
        for _ in range(segments):
            first = offset
            of_segment = []
            for _ in range(batches):
                of_segment.append(batch_of(offset, records, value_bytes=value_bytes, timestamp=1_000_000 + offset))
                offset += records
            await self.add(partition, of_segment, first)
            made += of_segment
        return made
