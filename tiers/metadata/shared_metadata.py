"""`SharedMetadata` gives a process the answers of the state that another process keeps, for any metadata log.

That process writes into shared memory how fresh each metadata partition is, by the same monotonic clock. So waiting for
freshness means looking there again. It may also build a new state: the reader then opens the new file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tiers.broker.client import monotonic_ms
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import by_topic_id
from tiers.metadata.state.layout import STATE_FILE, StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.model.ids import TopicIdPartition

_LOOK_AGAIN_MS = 20


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


class SharedMetadata:
    """Implements `FreshMetadata` over the state in a folder that another process keeps. It must be made after a fork.

    It does not wait for that process: until the process has read the metadata, nothing is fresh."""

    def __init__(self, state_folder: Path) -> None:
        self.state = SharedState(state_folder)
        self.state.reopen_if_replaced()

    def close(self) -> None:
        self.state.close()

    def freshness_age_ms(self) -> int | None:
        """Returns the age of the metadata partition that is furthest behind; None: not all partitions were read yet."""
        identity = self.state.reopen_if_replaced()
        known = [self.state.fresh_at_ms(number) for number in range(identity.partition_count if identity else 0)]
        oldest_ms = None if None in known else min((at_ms for at_ms in known if at_ms is not None), default=None)
        return None if oldest_ms is None else max(0, monotonic_ms() - oldest_ms)

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self._is_fresh_since(partition, monotonic_ms() - max_age_ms)

    def _is_fresh_since(self, partition: TopicIdPartition, not_before_ms: int) -> bool:
        identity = self.state.reopen_if_replaced()
        if identity is None:
            return False
        fresh_at_ms = self.state.fresh_at_ms(by_topic_id(partition, identity.partition_count))
        return fresh_at_ms is not None and fresh_at_ms >= not_before_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        now_ms = monotonic_ms()
        # The time must be later, not equal: two events in the same millisecond have no order.
        while not self._is_fresh_since(partition, now_ms - max_age_ms + 1):
            if monotonic_ms() >= now_ms + timeout_ms:
                raise RemoteLogMetadataNotReadyError(
                    f"the process that keeps the metadata of {partition} did not read it in {timeout_ms} ms"
                )
            await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
