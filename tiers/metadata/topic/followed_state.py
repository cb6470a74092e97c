"""`FollowedState` has the positions up to which the metadata partitions were read, and the state of the records before.

The follower hands it the records of each answer. It replays them in the order of their offsets, once, and then moves
the positions. It also tells as of when each partition was read to its end, to this process and to the others that share
the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import lmdb

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state.replay import PartitionRead
from tiers.metadata.state.writer import TOO_OLD, RemoteLogMetadataStateWriter
from tiers.metadata.topic.tombstone_age import Moment, TombstoneAge
from tiers.metadata.topic.unreadable_partitions import UnreadablePartitions
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_READ_TO_END_MARK_MS = 60_000


class FollowedState:
    """`is_stopped` tells whether the follower reads a metadata partition no more until an operator decides.
    `on_forgotten` is called before the position of a metadata partition is set back."""

    def __init__(
        self,
        state: RemoteLogMetadataStateWriter,
        numbers: Iterable[int],
        unreadable: UnreadablePartitions,
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
        is_stopped: Callable[[int], bool],
        on_forgotten: Callable[[int], None],
    ) -> None:
        self._state = state
        self._unreadable = unreadable
        self._clock_ms = clock_ms
        self._is_stopped = is_stopped
        self._on_forgotten = on_forgotten
        self._positions = {number: state.consumed(number) for number in numbers}
        self.age = TombstoneAge(state.read_at_ms(), clock_ms, wall_clock_ms)
        self.fresh_at_ms: dict[int, int] = {}
        """As of when (monotonic) each metadata partition was read to its high watermark."""
        self.events_read = 0
        self._troubles: dict[int, str] = {}
        """Why what a leader answered could not be written, by its node id."""
        self._unfinished = state.unfinished_rebuilds()
        """The metadata partitions that lack records which `rebuild` has still to write."""
        self._to_clear: dict[int, str] = {}
        """The metadata partitions that the state must forget before anything is replayed, each with the reason."""
        self._marked_at_ms: int | None = None
        self._progress = asyncio.Condition()
        # Held from the check of the positions until they are moved, so that no record is replayed twice.
        self._replaying = asyncio.Lock()
        # One thread: LMDB syncs to disk at every commit, and the commits must stay in order.
        self._state_thread = ThreadPoolExecutor(1, thread_name_prefix="remote-log-metadata-state")

    def close(self) -> None:
        """Waits for a commit in progress. `run` must have ended."""
        self._state_thread.shutdown()
        try:
            self._state.mark_read_to_end(self._read_at_ms())
        except lmdb.Error as error:
            logger.warning(
                "the time of the last read to the end cannot be saved: the next start reads the topic again",
                extra={"error": str(error)},
            )

    def position(self, number: int) -> OffsetAndEpoch:
        """Returns the next offset to read, and the leader epoch of the last batch before it."""
        return self._positions[number]

    def read_in_epoch(self, number: int, leader_epoch: int) -> None:
        """Replaces the leader epoch of the position by one that the leader knows, and that means the same records."""
        self._positions[number] = OffsetAndEpoch(self._positions[number].offset, leader_epoch)

    def is_incomplete(self, number: int) -> bool:
        """Returns whether the state lacks records that lie before the position, or that `rebuild` has still to write.

        The metadata partition is not fresh then, wherever the position is. A rebuild that was killed may have marked
        only some metadata partitions, so a mark of one of them concerns all."""
        return number in self._to_clear or bool(self._unfinished)

    @property
    def unfinished_rebuild(self) -> str | None:
        """Returns which metadata partitions `rebuild` has not written to their end, as a text for an operator."""
        if not self._unfinished:
            return None
        return (
            f"`rebuild` has not written all records of the metadata partitions {sorted(self._unfinished)}: if it is not"
            " running any more, delete the topic and rebuild it again: see 'The metadata topic is lost' in"
            " docs/recovery.md"
        )

    def doubt(self, number: int) -> None:
        """Ends the freshness of a metadata partition, until it is read to its end again."""
        self.fresh_at_ms.pop(number, None)

    async def wait_for_position(self, metadata_partition: int, position: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: self._positions[metadata_partition].offset >= position)

    async def replay(
        self,
        reads: list[PartitionRead],
        asked: Mapping[int, OffsetAndEpoch],
        reached: dict[int, int],
        asked_at: Moment,
        too_old: Iterable[int],
    ) -> bool:
        """Replays the reads that still continue the positions: another answer or a new start may have moved them.

        It first forgets the partitions that are `too_old`. Returns whether no read failed."""
        async with self._replaying:
            reads = [
                read
                for read in reads
                if self._positions[read.metadata_partition].offset == asked[read.metadata_partition].offset
                and not self._is_stopped(read.metadata_partition)
            ]
            for number in set(too_old) & {read.metadata_partition for read in reads}:
                self._forget(number, TOO_OLD)
            reads = [read for read in reads if read.metadata_partition not in self._to_clear]
            await self._clear()
            with_events = applied = [read for read in reads if read.events]
            if with_events:
                applied = await self._apply(with_events)
                self.events_read += sum(len(read.events) for read in applied)
                self._see_unfinished(self._state.unfinished_rebuilds())
                reads = [read for read in reads if not read.events or read in applied]
            async with self._progress:
                for read in reads:
                    known = self._positions[read.metadata_partition]
                    leader_epoch = read.leader_epoch if read.leader_epoch >= 0 else known.leader_epoch
                    self._positions[read.metadata_partition] = OffsetAndEpoch(read.next_offset, leader_epoch)
                self._progress.notify_all()
            for read in reads:
                self._unreadable.read(read.metadata_partition, read.unknown)
                if read.unknown is not None:
                    self.fresh_at_ms.pop(read.metadata_partition, None)
            still_read = {read.metadata_partition for read in reads}
            self.mark_fresh({number: at_ms for number, at_ms in reached.items() if number in still_read}, asked_at)
            return len(applied) == len(with_events)

    def _see_unfinished(self, numbers: frozenset[int]) -> None:
        was_unfinished, self._unfinished = bool(self._unfinished), numbers
        if numbers:
            self.fresh_at_ms.clear()
        if numbers and not was_unfinished:
            logger.error("the remote log metadata is not followed", extra={"reason": self.unfinished_rebuild})
        elif was_unfinished and not numbers:
            logger.warning("the remote log metadata is followed again")

    async def _apply(self, reads: list[PartitionRead]) -> list[PartitionRead]:
        """Replays the reads, and returns those that could be replayed.

        All are one transaction. If it fails, each read is a transaction of its own, so that one partition alone fails.
        Raises `lmdb.Error` and `OSError`."""
        try:
            # If this task is cancelled, the commit still happens.
            await asyncio.shield(self.in_state_thread(lambda: self._state.apply(reads)))
        except (lmdb.Error, OSError):
            raise
        except Exception as error:  # any error becomes an alarm, and must not stop the other metadata partitions
            if len(reads) > 1:
                return [read for each in reads for read in await self._apply([each])]
            number = reads[0].metadata_partition
            if isinstance(error, RemoteLogMetadataError):
                self._forget(number, f"the saved state contradicts itself: {error}")
            self.doubt(number)
            self._unreadable.failed(number, error)
            return []
        return reads

    def _forget(self, number: int, reason: str) -> None:
        """Forgets the position of a metadata partition, before the state is cleared.

        Otherwise records that the state does not have any more would look as if they were never written."""
        self._to_clear[number] = reason
        self._on_forgotten(number)
        self._positions[number] = OffsetAndEpoch(0, -1)
        self._unreadable.forget(number)
        self.fresh_at_ms.pop(number, None)

    async def _clear(self) -> None:
        for reason in sorted(set(self._to_clear.values())):
            numbers = [number for number, why in self._to_clear.items() if why == reason]
            begins_at_ms = max(self.age.begins_again(number) for number in numbers)

            def clear(numbers: list[int] = numbers, reason: str = reason, begins_at_ms: int = begins_at_ms) -> None:
                self._state.start_over_partitions(numbers, reason, begins_at_ms)

            await self.in_state_thread(clear)
            for number in numbers:
                del self._to_clear[number]

    @property
    def trouble(self) -> str | None:
        """Returns why the state cannot be written, as a text for an operator; None when it can."""
        return next(iter(self._troubles.values()), None)

    def set_trouble(self, node_id: int, trouble: str) -> None:
        """Records that what a leader answered cannot be written."""
        if trouble not in self._troubles.values():
            logger.error("the remote log metadata is not followed", extra={"reason": trouble})
        self._troubles[node_id] = trouble

    def end_trouble(self, node_id: int) -> None:
        """Records that what a leader answered was written. A smaller write may succeed while that of another fails."""
        if self._troubles.pop(node_id, None) is not None and not self._troubles:
            logger.warning("the remote log metadata is followed again")

    def mark_fresh(self, fresh_at_ms: dict[int, int], asked_at: Moment) -> None:
        later = {
            number: at_ms
            for number, at_ms in fresh_at_ms.items()
            if at_ms > self.fresh_at_ms.get(number, -1)
            and not self._is_stopped(number)
            and not self.is_incomplete(number)
        }
        if later:
            self.fresh_at_ms |= later
            for number, at_ms in later.items():
                self.age.read_to_end(number, at_ms, asked_at)
            try:
                self._state.mark_fresh(later)
            except lmdb.Error as error:
                # Other processes see an older freshness than this one.
                logger.warning(
                    "the freshness of the metadata cannot be shared with other processes", extra={"error": str(error)}
                )

    async def mark_read_to_end(self) -> None:
        """Saves the times of the last reads to the end: once a minute, or at once to find out if the disk has room."""
        now_ms = self._clock_ms()
        is_marked = self._marked_at_ms is not None and now_ms - self._marked_at_ms < _READ_TO_END_MARK_MS
        if is_marked and self.trouble is None:
            return
        read_at_ms = self._read_at_ms()
        await self.in_state_thread(lambda: self._state.mark_read_to_end(read_at_ms))
        self._marked_at_ms = now_ms

    def _read_at_ms(self) -> dict[int, int]:
        """Returns the times to save. The saved records of a partition that is to be cleared are as old as before."""
        return {number: at_ms for number, at_ms in self.age.read_at_ms().items() if number not in self._to_clear}

    def in_state_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._state_thread, work)
