"""`TwoTierLog`: the logs of both tiers as readers see them. The proxy, the Spark source and `explain` ask it.

It answers by the metadata (`RemoteLog`), the bounds of the leaders' logs, and what the leaders say of leader epochs.
What it does not know now is an error, `NotKnownNow`, and never an answer of one tier alone.

`ensure_fresh` says whether the caller may trust an answer (docs/design.md, safety rule 1). The state may be cleared,
and read again from the start, after that. So an answer that rests on what the metadata does not have counts only if it
has the same reading of the records afterwards, and is still fresh (`require_fresh`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tiers.config.topic_policy import READING_PAUSED
from tiers.errors import NotKnownNow, RemoteLogError
from tiers.metadata.log_history import confirms
from tiers.metadata.metadata_log import FreshMetadata
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource
from tiers.model.log_start import LogGap

BEYOND_ALL = 2**63 - 1

LocalBounds = Callable[[TopicIdPartition], Awaitable[LocalLogBounds]]
"""Returns the bounds of the leader's log: recent ones, or those that the caller has read. Raises `BrokerError`."""


class TwoTierLog:
    def __init__(
        self, metadata: FreshMetadata, source: LogSource, local: LocalBounds, *, max_age_ms: int, timeout_ms: int
    ) -> None:
        """`max_age_ms` is the greatest age of fresh metadata, `timeout_ms` the deadline of a leader's answer."""
        self._metadata = metadata
        self._source = source
        self.local = local
        self._max_age_ms = max_age_ms
        self._timeout_ms = timeout_ms

    def remote(self, partition: TopicIdPartition) -> RemoteLog:
        return RemoteLog(self._metadata.state, partition)

    # Freshness

    def is_fresh(self, partition: TopicIdPartition) -> bool:
        try:
            return self._metadata.is_fresh(partition, self._max_age_ms)
        except RemoteLogError:
            return False

    async def ensure_fresh(self, partition: TopicIdPartition, timeout_ms: int, max_age_ms: int | None = None) -> int:
        """Returns the reading that is fresh, for `require_fresh`.

        Raises `NotKnownNow` if the metadata is not fresh, and does not become fresh within `timeout_ms`."""
        max_age_ms = self._max_age_ms if max_age_ms is None else max_age_ms
        try:
            reading = self._metadata.state.reading()
            if not self._metadata.is_fresh(partition, max_age_ms):
                await self._metadata.ensure_fresh(partition, max_age_ms, timeout_ms)
        except RemoteLogError as error:
            raise NotKnownNow(f"the metadata of {partition} is not fresh: {error}") from error
        return reading

    def require_fresh(self, partition: TopicIdPartition, reading: int) -> None:
        """Raises `NotKnownNow` if the metadata is not fresh now, or was cleared after `ensure_fresh`.

        `reading` is what that call returned. Call this after the reads that found nothing."""
        if not self.is_fresh(partition) or self._metadata.state.reading() != reading:
            raise NotKnownNow(f"the metadata of {partition} was cleared meanwhile")

    # The partition

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition, fresh or not. Its absence proves nothing."""
        try:
            return self._metadata.state.is_known(partition)
        except RemoteLogError:
            return False

    def is_tiered(self, partition: TopicIdPartition) -> bool:
        """Whether the metadata knows the partition. Raises `NotKnownNow` when that is unknown."""
        reading = self._metadata.state.reading()
        is_known = self._metadata.state.is_known(partition)
        if not is_known:
            self.require_fresh(partition, reading)
        return is_known

    def is_reading_paused(self, partition: TopicIdPartition) -> bool:
        """Whether an operator paused the reading of the topic's remote records."""
        try:
            return self._metadata.state.topic_tier_config(partition.topic_id).get(READING_PAUSED) == "true"
        except RemoteLogError:
            return False  # the read itself finds what is wrong with the metadata

    def remote_position(self, partition: TopicIdPartition, offset: int) -> int | None:
        """Returns `RemoteLog.remote_position`, by metadata that may not be fresh; None, too, if it cannot be read."""
        try:
            return self.remote(partition).remote_position(offset)
        except RemoteLogError:
            return None

    def is_known_for_good(self, partition: TopicIdPartition, offset: int) -> bool:
        """Whether the metadata topic is lost, so no metadata is fresh, and this offset was remote before the loss."""
        try:
            return self._metadata.state.is_final() and self.remote_position(partition, offset) is not None
        except RemoteLogError:
            return False

    # The bounds of both tiers

    async def log_start(self, partition: TopicIdPartition) -> int:
        """Returns the recorded log start; 0 without one. Raises `BrokerError`.

        The local bounds may cost a request, so the method asks for them only if a log start hides remote records."""
        remote, earliest = self.remote(partition), self._metadata.state.earliest_offset(partition)
        recorded = remote.log_start()
        is_hiding = earliest is not None and earliest < recorded
        return remote.log_start((await self.local(partition)).log_start_offset) if is_hiding else recorded

    async def earliest(self, partition: TopicIdPartition, local_log_start: int) -> int | None:
        """Returns `RemoteLog.earliest`. Raises `BrokerError`, and `NotKnownNow` if earlier records may exist."""
        remote = self.remote(partition)
        log_start = remote.log_start(local_log_start)
        is_unknown = remote.attempt_at_head(log_start, local_log_start) is not None
        if is_unknown or await self.has_lost_head(partition, log_start):
            raise NotKnownNow(
                f"{partition}: it is not known whether the store has the records before offset {local_log_start}"
            )
        return remote.earliest(local_log_start)

    async def next_local(self, partition: TopicIdPartition) -> int:
        """Returns `RemoteLog.next_local`. Raises `NotKnownNow` and `BrokerError`."""
        log_start = await self.log_start(partition)
        if await self.has_lost_head(partition, log_start):
            raise _in_neither(partition, log_start, log_start)
        return self.remote(partition).next_local(await self.local(partition))

    # What neither tier has

    async def has_lost_head(self, partition: TopicIdPartition, log_start: int) -> bool:
        """Whether the metadata lost the segments below a recorded trim. Then the log start is unknown.

        Raises `BrokerError`."""
        trim = self.remote(partition).lost_trim(log_start)
        return trim is not None and await confirms(self._source, partition, trim, self._timeout_ms)

    async def require_no_hole(self, partition: TopicIdPartition, log_start: int, answer: int) -> None:
        """Checks that the metadata explains all offsets below `answer` that the local log does not have.

        `answer` -1: no record is named, so the check covers the whole log. A record that neither tier has may have the
        timestamp, while its metadata is lost. A client that began at the later offset would skip it. Raises
        `NotKnownNow` and `BrokerError`."""
        remote = self.remote(partition)
        limit = answer if answer >= 0 else BEYOND_ALL
        explained = await remote.explained_to(log_start, limit)
        if await self.has_lost_head(partition, log_start):
            raise _in_neither(partition, log_start, remote.hole_end(log_start, limit))
        is_explained = explained is None or explained >= limit
        if is_explained and remote.attempt_at_head(log_start, limit) is None:
            return  # the local bounds may cost a request
        end = min(limit, (await self.local(partition)).log_start_offset)
        first = remote.attempt_at_head(log_start, end)
        first = explained if first is None and not is_explained else first
        if first is not None and first < end:
            raise _in_neither(partition, first, remote.hole_end(first, end))

    async def unknown_offsets(self, partition: TopicIdPartition) -> list[LogGap]:
        """Returns `RemoteLog.unknown_offsets`. Raises `BrokerError`."""
        remote, local_start = self.remote(partition), (await self.local(partition)).log_start_offset
        return await remote.unknown_offsets(remote.log_start(local_start), local_start)


def _in_neither(partition: TopicIdPartition, first: int, end: int) -> NotKnownNow:
    return NotKnownNow(f"{partition}: the offsets {first} to {max(first, end - 1)} are in neither tier")
