"""`SharedMetadataLog` gives a worker process the same answers, from the state that another process keeps.

That process writes into shared memory how fresh each metadata partition is, by the same monotonic clock. So waiting for
freshness means looking there again. It may also build a new state: the reader then opens the new file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataStatus, by_topic_id
from tiers.metadata.records.serde import nothing_key, tombstone
from tiers.metadata.state.layout import STATE_FILE, StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.metadata.topic.metadata_topic import DEFAULT_TOPIC_NAME, MetadataTopic
from tiers.metadata.topic.settings import metadata_group_id
from tiers.metadata.topic.topic_log import TopicLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch

_LOOK_AGAIN_MS = 20
_WRITE_TIMEOUT_MS = 8_000


class SharedState(RemoteLogMetadataState):
    """The state in a folder that another process keeps. It opens by itself when it is first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._file: tuple[int, int] | None = None
        self._identity: StateIdentity | None = None

    @property
    def _opened(self) -> StateFiles:
        if self._files is None:
            self.reopen_if_replaced()
        return super()._opened

    def reopen_if_replaced(self) -> StateIdentity | None:
        """Opens the state again if its file was replaced. Returns whose state is open; None: there is none."""
        try:
            status = (self._folder / STATE_FILE).stat()
        except OSError:
            self.close()
            return None
        file = (status.st_dev, status.st_ino)
        if file == self._file and self._files is not None and self.identity() == self._identity:
            return self._identity
        self.close()
        try:
            self._files, self._file = StateFiles.open_shared(self._folder), file
        except RemoteLogMetadataNotReadyError:
            return None
        self._identity = self.identity()
        if self._identity is None:
            self.close()
        return self._identity


class SharedMetadataLog(TopicLog):
    """Implements `MetadataLog` without any ownership. It must be opened after a fork.

    `name` distinguishes the processes that share the folder. Two running processes must not have the same name."""

    def __init__(
        self,
        client: BrokerClient,
        state_folder: Path,
        name: str,
        *,
        topic_name: str = DEFAULT_TOPIC_NAME,
    ) -> None:
        super().__init__(client, metadata_group_id(topic_name), _WRITE_TIMEOUT_MS)
        self.state = SharedState(state_folder)
        self._name = name
        self._topic_name = topic_name

    async def open(self) -> None:
        """Opens the state. Does not wait for the process that keeps it: until that process starts, nothing is fresh."""
        self.state.reopen_if_replaced()

    async def close(self) -> None:
        self.state.close()

    @property
    def topic(self) -> MetadataTopic:
        identity = self.state.reopen_if_replaced()
        if identity is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        return MetadataTopic(identity.cluster_id, self._topic_name, identity.topic_id, identity.partition_count)

    @property
    def writer(self) -> str:
        keeper = self.state.writer()
        if keeper is None:
            raise RemoteLogMetadataNotReadyError("the process that keeps the state has not chosen its writer name yet")
        return f"{keeper}/{self._name}"

    def owns(self, partition: TopicIdPartition) -> bool:
        return False

    def tenure(self, partition: TopicIdPartition) -> None:
        return None

    def status(self) -> MetadataStatus:
        identity = self.state.reopen_if_replaced()
        known = [self.state.fresh_at_ms(number) for number in range(identity.partition_count if identity else 0)]
        oldest_ms = None if None in known else min((at_ms for at_ms in known if at_ms is not None), default=None)
        return MetadataStatus(None, None if oldest_ms is None else max(0, monotonic_ms() - oldest_ms))

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self._is_fresh_since(partition, monotonic_ms() - max_age_ms)

    def _is_fresh_since(self, partition: TopicIdPartition, not_before_ms: int) -> bool:
        identity = self.state.reopen_if_replaced()
        if identity is None:
            return False
        fresh_at_ms = self.state.fresh_at_ms(by_topic_id(partition, identity.partition_count))
        return fresh_at_ms is not None and fresh_at_ms >= not_before_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        # The time must be later, not equal: two events in the same millisecond have no order.
        not_before_ms = monotonic_ms() - max_age_ms + 1
        await self._look_until(lambda: self._is_fresh_since(partition, not_before_ms), str(partition), timeout_ms)

    async def _append_as_owner(self, number: int, records: MakeRecords, timeout_ms: int) -> None:
        raise OwnershipLostError("another process keeps the state, and only that process can be the owner")

    def _read_to(self, number: int) -> OffsetAndEpoch:
        return self.state.consumed(number)

    _known = _read_to

    async def _read_to_end(self, partition: TopicIdPartition, timeout_ms: int) -> None:
        # A record ends the long poll of the process that keeps the state. A change that waits for the poll's own end
        # would often be fenced by another one.
        await self.append(partition, lambda: [tombstone(nothing_key(partition))], Append.AT_ONCE, timeout_ms)

    async def _read_past(self, number: int, written: int, before: OffsetAndEpoch, timeout_ms: int) -> None:
        if written < before.offset:
            raise RemoteLogMetadataNotReadyError(
                f"a record was written at offset {written} of metadata partition {number}, which was read to"
                f" {before.offset}: the topic lost records"
            )
        what = f"metadata partition {number}"
        await self._look_until(lambda: self.state.next_offset(number) > written, what, timeout_ms)

    async def _look_until(self, holds: Callable[[], bool], what: str, timeout_ms: int) -> None:
        deadline_ms = monotonic_ms() + timeout_ms
        while not holds():
            if monotonic_ms() >= deadline_ms:
                raise RemoteLogMetadataNotReadyError(
                    f"the process that keeps the metadata of {what} did not read it in {timeout_ms} ms"
                )
            await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
