"""The in-memory metadata manager with a journal on disk, which survives the process, also after SIGKILL."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection
from pathlib import Path

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
)

Call = tuple[str, tuple[object, ...]]


class JournaledRemoteLogMetadataManager(InMemoryRemoteLogMetadataManager):
    """A write is durable before it returns. `open` replays the journal."""

    def __init__(self, journal: Path) -> None:
        super().__init__()
        self._journal = journal

    async def open(self) -> None:
        calls: list[Call] = []
        if self._journal.exists():
            with self._journal.open("rb") as journal:
                while True:
                    try:
                        calls.append(pickle.load(journal))
                    except (EOFError, pickle.UnpicklingError):  # the end, or a record that a crash cut short
                        break
        base = InMemoryRemoteLogMetadataManager
        for name, arguments in calls:
            await getattr(base, name)(self, *arguments)

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        await super().add_remote_log_segment_metadata(metadata)
        self._append("add_remote_log_segment_metadata", metadata)

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        await super().update_remote_log_segment_metadata(update)
        self._append("update_remote_log_segment_metadata", update)

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        await super().put_remote_partition_delete_metadata(metadata)
        self._append("put_remote_partition_delete_metadata", metadata)

    async def put_remote_log_clamp(self, clamp: RemoteLogClampUpdate) -> None:
        await super().put_remote_log_clamp(clamp)
        self._append("put_remote_log_clamp", clamp)

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        await super().put_local_log_start(partition, start)
        self._append("put_local_log_start", partition, start)

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        denied: Collection[LogStart] = (),
    ) -> None:
        await super().put_log_start(partition, start, timeout_ms, denied)
        self._append("put_log_start", partition, start, timeout_ms, tuple(denied))

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        await super().put_log_gap(partition, gap, leader_epoch)
        self._append("put_log_gap", partition, gap, leader_epoch)

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        await super().end_log_gap(partition, gap)
        self._append("end_log_gap", partition, gap)

    def _append(self, name: str, *arguments: object) -> None:
        with self._journal.open("ab") as journal:
            journal.write(pickle.dumps((name, arguments)))
            journal.flush()
            os.fsync(journal.fileno())
