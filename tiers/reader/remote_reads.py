"""`RemoteReads`: what a proxy asks of the remote tier, whichever process reads it."""

from __future__ import annotations

from typing import Protocol

from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.remote_log_offset_reader import TimestampOffset
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest


class RemoteOffsets(Protocol):
    """The contract is that of `RemoteLogOffsetReader`."""

    async def offset_for_timestamp(
        self,
        partition: TopicIdPartition,
        timestamp_ms: int,
        from_offset: int,
        to_offset: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> TimestampOffset | None: ...

    async def max_timestamp(
        self, partition: TopicIdPartition, from_offset: int, to_offset: int, *, deadline_ms: int, connection_id: int
    ) -> TimestampOffset | None: ...


class RemoteReads(Protocol):
    """The contract is that of `RemoteLogReader`."""

    @property
    def offsets(self) -> RemoteOffsets: ...

    async def read(self, request: RemoteReadRequest) -> RemoteRead: ...

    async def leader_epochs(
        self, partition: TopicIdPartition, *, deadline_ms: int, connection_id: int
    ) -> tuple[LeaderEpochEntry, ...]: ...
