"""`FollowedState` has the metadata partitions as far as they were read, and writes the state of their records.

The follower gives it the records of each answer. It replays them in the order of their offsets, once, and then moves
the positions. It also says as of when each partition was read to its end, to this process and to the others that share
the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import lmdb

from tiers.broker.client import Moment
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state.replay import PartitionRead
from tiers.metadata.state.writer import TOO_OLD, RemoteLogMetadataStateWriter
from tiers.metadata.topic.followed_partition import FollowedPartition
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_READ_TO_END_MARK_MS = 60_000


@dataclass(slots=True, eq=False)
class Answer:
    """What a leader answered about a metadata partition that was asked for from `position` on."""

    partition: FollowedPartition
    position: OffsetAndEpoch
    read: PartitionRead
    as_of_ms: int | None
    """As of when (monotonic) the read ends at the high watermark; None: it does not."""
    is_too_old: bool = False
    """Whether the records may lack tombstones."""


class FollowedState:
    def __init__(
        self,
        state: RemoteLogMetadataStateWriter,
        partition_count: int,
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._state = state
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        now, read_at_ms, diverged = self.now(), state.read_at_ms(), state.diverged()
        self.partitions = [
            FollowedPartition(
                number, state.consumed(number), state.reached(number), diverged.get(number), number in diverged
            )
            for number in range(partition_count)
        ]
        for number, at_ms in read_at_ms.items():
            self.partitions[number].complete_as_of = Moment(now.monotonic_ms - (now.wall_ms - at_ms), at_ms)
        self.misplaced: str | None = None
        """Why no metadata partition is believed: a record is in another one than that of its user partition."""
        self.events_read = 0
        self._troubles: dict[int, str] = {}
        """Why what a leader answered could not be written, by its node id."""
        self._unfinished = state.unfinished_rebuilds()
        """The metadata partitions that lack records which `rebuild` has still to write."""
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

    def now(self) -> Moment:
        return Moment(self._clock_ms(), self._wall_clock_ms())

    def stopped(self, partition: FollowedPartition) -> str | None:
        """Returns why the follower does not read the metadata partition any more; None while it reads it.

        The follower reads on only after an operator decides, or upgrades this process."""
        return self.misplaced or partition.diverged or partition.unknown

    def is_incomplete(self, partition: FollowedPartition) -> bool:
        """Returns whether the state lacks records that lie before the position, or that `rebuild` has still to write.

        The metadata partition is not fresh then, wherever the position is. A rebuild that was killed may have marked
        only some metadata partitions, so a mark of one of them concerns all."""
        return partition.to_clear is not None or bool(self._unfinished)

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

    def reading(self) -> int:
        return self._state.reading()

    def doubt_all(self) -> None:
        for partition in self.partitions:
            partition.fresh_at_ms = None

    async def wait_for_position(self, partition: FollowedPartition, offset: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: partition.position.offset >= offset)

    async def replay(self, answers: Sequence[Answer], asked_at: Moment) -> bool:
        """Replays the reads that still continue the positions: another answer or a new start may have moved them.

        It first forgets the partitions that are too old. Returns whether no read failed."""
        async with self._replaying:
            continuing: list[Answer] = []
            for answer in answers:
                partition = answer.partition
                if partition.position.offset != answer.position.offset or self.stopped(partition) is not None:
                    continue
                if answer.is_too_old:
                    partition.forget(TOO_OLD)
                if partition.to_clear is None:
                    continuing.append(answer)
            await self._clear()
            with_events = [each.read for each in continuing if each.read.events]
            applied = await self._apply(with_events) if with_events else []
            if with_events:
                self.events_read += sum(len(read.events) for read in applied)
                self._see_unfinished(self._state.unfinished_rebuilds())
            replayed = [each for each in continuing if not each.read.events or each.read in applied]
            async with self._progress:
                for answer in replayed:
                    read, known = answer.read, answer.partition.position
                    leader_epoch = read.leader_epoch if read.leader_epoch >= 0 else known.leader_epoch
                    answer.partition.position = OffsetAndEpoch(read.next_offset, leader_epoch)
                self._progress.notify_all()
            for answer in replayed:
                answer.partition.was_read(answer.read.unknown)
            reached = [(each.partition, each.as_of_ms) for each in replayed if each.as_of_ms is not None]
            self.mark_fresh(reached, asked_at)
            return len(applied) == len(with_events)

    def _see_unfinished(self, numbers: frozenset[int]) -> None:
        was_unfinished, self._unfinished = bool(self._unfinished), numbers
        if numbers:
            self.doubt_all()
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
            partition = self.partitions[reads[0].metadata_partition]
            if isinstance(error, RemoteLogMetadataError):
                partition.forget(f"the saved state contradicts itself: {error}")
            partition.fail(error)
            return []
        return reads

    async def _clear(self) -> None:
        for reason in sorted({each.to_clear for each in self.partitions if each.to_clear is not None}):
            partitions = [each for each in self.partitions if each.to_clear == reason]
            now = self.now()
            for each in partitions:
                each.complete_as_of = now
            numbers = [each.number for each in partitions]
            await self.in_state_thread(partial(self._state.start_over_partitions, numbers, reason, now.wall_ms))
            for each in partitions:
                each.to_clear = None

    async def save_divergences(self) -> None:
        for partition in self.partitions:
            reason = partition.diverged
            if reason is None or partition.is_divergence_saved:
                continue
            try:
                await self.in_state_thread(partial(self._state.mark_diverged, partition.number, reason))
            except (lmdb.Error, OSError) as error:
                # This process remembers the divergence and tries again. A restarted process has to find it again.
                logger.warning("the divergence of a metadata partition cannot be saved", extra={"error": str(error)})
            else:
                partition.is_divergence_saved = True

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

    def mark_fresh(self, fresh: Iterable[tuple[FollowedPartition, int]], asked_at: Moment) -> None:
        later: dict[int, int] = {}
        for partition, at_ms in fresh:
            known_ms = -1 if partition.fresh_at_ms is None else partition.fresh_at_ms
            if at_ms > known_ms and self.stopped(partition) is None and not self.is_incomplete(partition):
                partition.read_to_end(at_ms, asked_at)
                later[partition.number] = at_ms
        if later:
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
        await self.in_state_thread(partial(self._state.mark_read_to_end, self._read_at_ms()))
        self._marked_at_ms = now_ms

    def _read_at_ms(self) -> dict[int, int]:
        """Returns the times to save. The saved records of a partition that is to be cleared are as old as before."""
        return {
            each.number: each.complete_as_of.wall_ms
            for each in self.partitions
            if each.complete_as_of is not None and each.to_clear is None
        }

    def in_state_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._state_thread, work)
