"""`MetadataFollower` reads every metadata partition, read_committed, and keeps the materialised state up to date.

* It has one long poll at a time per leader, over all partitions that the leader leads. All records of one response are
  one transaction of the state. Without a record to replay, only the positions in memory move.
* A partition is fresh as of the time at which a request was sent, if the follower has read up to the high watermark of
  its response and the leader was still the leader then (`MetadataLeadership`). The LSO is not enough: a look-up may
  depend on records behind an open transaction (docs/design.md, safety rule 1).
* While the state cannot be written (disk or map full), it is not fresh, and reading goes on.
* Corrupt, lost or unknown records concern their metadata partition alone: `FollowedPartition` says why it is not fresh.
  After a record in another metadata partition than that of its user partition, or while `rebuild` has not written all
  of them, no metadata partition is fresh.
* If the topic lacks records that were read before, the state keeps them (`MetadataLineage`). Every Fetch names the
  leader epoch of the last batch that was read, so that a leader with another history answers where they diverge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import lmdb

from protocol.errors import ErrorCode, ProtocolError
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchedPartition, FetchPosition, fetch_raw
from tiers.errors import BrokerError, RemoteLogMetadataNotReadyError
from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.state.replay import PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.committed_records import read_committed
from tiers.metadata.topic.followed_partition import ASK_AFTER_MS, NO_LEADER, FollowedPartition
from tiers.metadata.topic.followed_state import Answer, FollowedState
from tiers.metadata.topic.leadership import LATEST_TIMESTAMP, MetadataLeadership
from tiers.metadata.topic.lineage import MetadataLineage
from tiers.metadata.topic.metadata_topic import REBUILD_AFTER_GROWTH, MetadataTopic, delete_retention_ms
from tiers.metadata.topic.settings import MAX_AGE_MS
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch

logger = logging.getLogger(__name__)

FETCH_LANE = "remote-log-metadata"
EARLIEST_TIMESTAMP = -2
_MAX_INTERVAL_MS = 500
_MIN_INTERVAL_MS = 20
_FETCH_MAX_BYTES = 8 * 1024 * 1024
_FETCH_TIMEOUT_MS = 10_000
_BROKERS_MAX_AGE_MS = 5_000
_LEADERS_TIMEOUT_MS = 2_000
_BACKOFF = Backoff(base_ms=50, cap_ms=1_000)


def interval_ms(max_age_ms: int) -> int:
    """Returns how long a poll may take, and how often the leaders are confirmed.

    An answer counts as of the beginning of its poll, or of an earlier confirmation of the leader. So just before it,
    the metadata is as old as two polls and an interval between confirmations: a quarter of `max_age_ms` each."""
    return min(_MAX_INTERVAL_MS, max(_MIN_INTERVAL_MS, max_age_ms // 4))


class MetadataFollower:
    """`max_age_ms` is the age up to which metadata counts as fresh."""

    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        state: RemoteLogMetadataStateWriter,
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
        home_of: Callable[[TopicIdPartition], int] | None = None,
        max_age_ms: int = MAX_AGE_MS,
    ) -> None:
        """`home_of` returns the metadata partition of a user partition. None: every record is in its place."""
        self._client = client
        self._topic = topic
        self._home_of = home_of
        self._interval_ms = interval_ms(max_age_ms)
        self._clock_ms = clock_ms
        self._readers: set[int] = set()
        self._leaders_changed = asyncio.Event()
        self._probes = [asyncio.Lock() for _ in range(topic.partition_count)]
        self.foreign_records_read = 0
        self._no_leaders = LastingTrouble(
            logger,
            "the metadata topic's leaders are not known",
            "the metadata topic's leaders are known again",
            clock_ms=clock_ms,
        )
        # With the level INFO, because the leaders of a new topic need a moment.
        self._unreadable = LastingTrouble(
            logger,
            "some metadata partitions cannot be read yet",
            "all metadata partitions can be read",
            clock_ms=clock_ms,
            level=logging.INFO,
        )
        self._followed = FollowedState(state, topic.partition_count, clock_ms=clock_ms, wall_clock_ms=wall_clock_ms)
        self._partitions = self._followed.partitions
        self._leadership = MetadataLeadership(client, topic, self._partitions, clock_ms=clock_ms)
        self._lineage = MetadataLineage(self._leadership, self._followed)

    def close(self) -> None:
        """Waits for a commit in progress. `run` must have ended."""
        self._followed.close()

    @property
    def events_read(self) -> int:
        """Returns the number of committed records that this follower has read."""
        return self._followed.events_read

    @property
    def trouble(self) -> str | None:
        """Returns why the state does not follow the topic, as a text for an operator; None when it does."""
        of_one = next((each.trouble for each in self._partitions if each.trouble is not None), None)
        return self.trouble_of_all or of_one or self._followed.unfinished_rebuild

    @property
    def trouble_of_all(self) -> str | None:
        """Returns why the state cannot be written, or must not be believed, in every metadata partition."""
        return self._followed.trouble or self._followed.misplaced

    def position(self, metadata_partition: int) -> int:
        return self._partitions[metadata_partition].position.offset

    def read_to(self, metadata_partition: int) -> OffsetAndEpoch:
        """Returns the next offset to read, and the leader epoch of the last batch before it."""
        return self._partitions[metadata_partition].position

    def known(self, metadata_partition: int) -> OffsetAndEpoch:
        """Returns the next offset to read, and the leader epoch that is known now; -1: none is."""
        partition = self._partitions[metadata_partition]
        return OffsetAndEpoch(partition.position.offset, partition.leader.leader_epoch)

    def reading(self) -> int:
        """Returns `RemoteLogMetadataState.reading`."""
        return self._followed.reading()

    def fresh_at_ms(self, metadata_partition: int) -> int | None:
        return self._partitions[metadata_partition].fresh_at_ms

    def is_fresh(self, metadata_partition: int, max_age_ms: int) -> bool:
        fresh_at_ms = self.fresh_at_ms(metadata_partition)
        return fresh_at_ms is not None and fresh_at_ms >= self._clock_ms() - max_age_ms

    def oldest_age_ms(self) -> int | None:
        """Returns the age of the last read to the end of the partition that is furthest behind.

        None: at least one partition was never read to its end."""
        known = [each.fresh_at_ms for each in self._partitions if each.fresh_at_ms is not None]
        return max(0, self._clock_ms() - min(known)) if len(known) == len(self._partitions) else None

    async def ensure_fresh(self, metadata_partition: int, max_age_ms: int, timeout_ms: int) -> None:
        not_before_ms = self._clock_ms() - max_age_ms
        partition = self._partitions[metadata_partition]

        def is_fresh() -> bool:
            # The time must be later, not equal: two events in the same millisecond have no order.
            return partition.fresh_at_ms is not None and partition.fresh_at_ms > not_before_ms

        if is_fresh():
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._probes[metadata_partition]:
                failures = 0
                while not is_fresh():
                    try:
                        await self._read_to_end(partition, not_before_ms, timeout_ms)
                        return
                    except BrokerError:
                        self._leaders_changed.set()
                        failures += 1
                        await asyncio.sleep(_BACKOFF.pause_ms(failures) / 1000)
        except TimeoutError as error:
            stopped = self._followed.stopped(partition) or self._followed.unfinished_rebuild
            raise RemoteLogMetadataNotReadyError(
                f"metadata partition {metadata_partition} was not read to its end in {timeout_ms} ms"
                f"{'' if stopped is None else f': {stopped}'}"
            ) from error

    async def _read_to_end(self, partition: FollowedPartition, not_before_ms: int, timeout_ms: int) -> None:
        number = partition.number
        stopped = self._followed.stopped(partition)
        if stopped is not None:
            raise BrokerError(stopped, retriable=True)
        await self._leadership.confirm(min(timeout_ms, _LEADERS_TIMEOUT_MS), partition)
        leader = partition.leader
        if leader.node_id == NO_LEADER.node_id:
            raise BrokerError(
                f"metadata partition {number} has no leader", ErrorCode.LEADER_NOT_AVAILABLE, retriable=True
            )
        await self._lineage.ask({number: leader}, timeout_ms)
        if partition.believed != leader:
            raise BrokerError("the leader of the metadata partition may lack records that were read", retriable=True)
        asked_at = self._followed.now()
        # Read first: the follower may read beyond the answer meanwhile.
        position = partition.position.offset
        high_watermark = await self._list_offset(partition, LATEST_TIMESTAMP, timeout_ms)
        if not self._lineage.is_within(partition, position, high_watermark):
            raise BrokerError("the metadata topic lost records", retriable=True)
        await self._followed.wait_for_position(partition, high_watermark)
        as_of_ms = partition.holds_as_of(leader, asked_at.monotonic_ms)
        if self._followed.is_incomplete(partition) or as_of_ms is None or as_of_ms < not_before_ms:
            raise BrokerError(
                "the leader of the metadata partition is not confirmed, or the state is being read or written again",
                retriable=True,
            )
        self._followed.mark_fresh([(partition, as_of_ms)], asked_at)

    async def read_past(self, metadata_partition: int, offset: int, before: OffsetAndEpoch, timeout_ms: int) -> None:
        """Waits until the record at `offset` is replayed. `before` was `known` before the record was written.

        Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`, and when the record may be lost: its offset lies
        below `before`, so the log lost records, or the leader epoch has changed since, so an unclean election may have
        put another record there. -1: no leader epoch was known."""
        partition = self._partitions[metadata_partition]
        if offset < before.offset:
            partition.fresh_at_ms = None
            raise RemoteLogMetadataNotReadyError(
                f"a record was written at offset {offset} of metadata partition {metadata_partition}, which was read to"
                f" {before.offset}: the topic lost records"
            )
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._followed.wait_for_position(partition, offset + 1)
        except TimeoutError as error:
            raise RemoteLogMetadataNotReadyError(
                f"offset {offset} of metadata partition {metadata_partition} was not read in {timeout_ms} ms"
            ) from error
        if before.leader_epoch >= 0 and partition.leader.leader_epoch != before.leader_epoch:
            partition.fresh_at_ms = None
            raise RemoteLogMetadataNotReadyError(
                f"the leader of metadata partition {metadata_partition} changed during a write at offset {offset}: the"
                " record may be lost"
            )

    async def run(self) -> None:
        """Reads until cancelled, and retries after errors of brokers."""
        failures = 0
        async with asyncio.TaskGroup() as readers:
            while True:
                self._leaders_changed.clear()
                try:
                    await self._leadership.confirm(_LEADERS_TIMEOUT_MS)
                    failures = 0
                    self._no_leaders.ended()
                except BrokerError as error:
                    self._no_leaders.found(error=str(error))
                    failures += 1
                for node_id in {each.leader.node_id for each in self._partitions} - {NO_LEADER.node_id} - self._readers:
                    self._readers.add(node_id)
                    readers.create_task(self._read_from(node_id), name=f"remote-log-metadata-{node_id}")
                with contextlib.suppress(BrokerError):  # without an answer, the cached addresses of brokers are used
                    await self._client.brokers(0 if failures else _BROKERS_MAX_AGE_MS, _LEADERS_TIMEOUT_MS)
                try:
                    async with asyncio.timeout(self._interval_ms / 1000):
                        await self._leaders_changed.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(_BACKOFF.pause_ms(1) / 1000)

    async def _read_from(self, node_id: int) -> None:
        failures = 0
        failing = LastingTrouble(
            logger, "a read of remote log metadata failed", "remote log metadata is read again", clock_ms=self._clock_ms
        )
        try:
            while partitions := self._read_from_leader(node_id):
                # The broker fills the partitions in the order of the request until the bytes are used up.
                partitions.sort(key=lambda each: (each.failure is not None, each.fresh_at_ms or 0))
                is_whole = False
                try:
                    is_whole = await self._poll(node_id, partitions)
                    failing.ended()
                except (BrokerError, ProtocolError) as error:
                    failing.found(node_id=node_id, error=str(error))
                except (lmdb.Error, OSError) as error:
                    self._followed.set_trouble(node_id, f"the saved state cannot be written: {error}")
                except Exception as error:  # any error becomes an alarm, and must not end the process
                    logger.exception("a read of remote log metadata failed", extra={"node_id": node_id})
                    self._followed.set_trouble(node_id, f"records cannot be replayed: {error!r}")
                if is_whole:
                    failures = 0
                else:
                    self._leaders_changed.set()
                    failures += 1
                    await asyncio.sleep(_BACKOFF.pause_ms(failures) / 1000)
        finally:
            self._followed.end_trouble(node_id)  # it leads nothing now: those that do will tell
            self._readers.discard(node_id)

    def _read_from_leader(self, node_id: int) -> list[FollowedPartition]:
        """Returns the metadata partitions that the broker leads, and that the follower reads."""
        led = [each for each in self._partitions if each.leader.node_id == node_id]
        return [each for each in led if self._followed.stopped(each) is None]

    async def _poll(self, node_id: int, partitions: list[FollowedPartition]) -> bool:
        """Sends one Fetch, and replays its records. Returns whether every partition was answered without an error."""
        leaders = {each.number: each.leader for each in partitions}
        await self._lineage.ask(leaders, _FETCH_TIMEOUT_MS)
        asked_at = self._followed.now()
        asked = {each.number: each.position for each in partitions if self._followed.stopped(each) is None}
        for number, position in asked.items():
            if position.offset == 0:
                self._partitions[number].complete_as_of = asked_at
        if not asked:
            return True
        fetches = await fetch_raw(
            self._client,
            node_id,
            [
                FetchPosition(
                    self._topic.topic_id,
                    number,
                    position.offset,
                    leaders[number].leader_epoch,
                    last_fetched_epoch=position.leader_epoch,
                )
                for number, position in asked.items()
            ],
            max_bytes=_FETCH_MAX_BYTES,
            max_wait_ms=self._interval_ms,
            timeout_ms=_FETCH_TIMEOUT_MS,
            lane=FETCH_LANE,
        )
        is_whole = True
        answers: list[Answer] = []
        for fetched in fetches:
            # After a change of leader, the reader of the new leader may have moved the position meanwhile.
            partition, position = self._partitions[fetched.partition], asked[fetched.partition]
            if position.offset != partition.position.offset:
                continue
            leader = leaders[partition.number]
            read = await self._read_or_none(partition, fetched, position, partition.believed == leader)
            if read is None:
                is_whole = False
                continue
            as_of_ms = partition.holds_as_of(leader, asked_at.monotonic_ms)
            reaches_end = read.next_offset >= fetched.high_watermark
            answer = Answer(partition, position, read, as_of_ms if reaches_end else None)
            # An answer without an offset behind the position proves that nothing was written since it was reached,
            # whatever its age.
            answer.is_too_old = fetched.high_watermark > position.offset and self._is_too_old(partition, ASK_AFTER_MS)
            answers.append(answer)
        self._log_unreadable()
        if any(each.is_too_old for each in answers):
            kept_ms = await delete_retention_ms(self._client, self._topic.name, _FETCH_TIMEOUT_MS)
            for answer in answers:
                answer.is_too_old &= self._is_too_old(answer.partition, kept_ms // 2)
        is_whole &= await self._followed.replay(answers, asked_at)
        await self._followed.mark_read_to_end()
        self._followed.end_trouble(node_id)
        return is_whole and not any(each.is_too_old for each in answers)

    def _is_too_old(self, partition: FollowedPartition, max_age_ms: int) -> bool:
        return partition.is_too_old(self._followed.now(), max_age_ms)

    def _log_unreadable(self) -> None:
        codes = [each.error_code for each in self._partitions if self._followed.stopped(each) is None]
        if any(codes):
            refused = [code for code in codes if code]
            self._unreadable.found(metadata_partitions=len(refused), error_codes=sorted(set(refused)))
        else:
            self._unreadable.ended()

    async def _read_or_none(
        self, partition: FollowedPartition, fetched: FetchedPartition, position: OffsetAndEpoch, is_known: bool
    ) -> PartitionRead | None:
        """Returns what `_read` returns, or None after an error, which concerns this metadata partition alone."""
        try:
            return await self._read(partition, fetched, position, is_known)
        except BrokerError as error:
            partition.error_code = error.code or ErrorCode.UNKNOWN_SERVER_ERROR
        except (lmdb.Error, OSError):
            raise
        except Exception as error:  # any error becomes an alarm, and must not stop the other metadata partitions
            partition.fail(error)
        return None

    async def _read(
        self, partition: FollowedPartition, fetched: FetchedPartition, position: OffsetAndEpoch, is_known: bool
    ) -> PartitionRead | None:
        """Returns the committed records of `fetched`, or None when they must not be replayed.

        They are not replayed after an error, or when the leader is not known to continue the log that was read."""
        partition.error_code = ErrorCode.NONE
        if fetched.error == ErrorCode.OFFSET_OUT_OF_RANGE:
            earliest = await self._list_offset(partition, EARLIEST_TIMESTAMP, _FETCH_TIMEOUT_MS)
            latest = await self._list_offset(partition, LATEST_TIMESTAMP, _FETCH_TIMEOUT_MS)
            self._lineage.out_of_range(partition, position.offset, earliest, latest)
            return None
        if fetched.diverging is not None and fetched.error == ErrorCode.NONE:
            if await self._lineage.continues(partition, position, fetched.diverging, fetched.high_watermark):
                # A replica that copied the log after a compaction does not know an epoch without remaining records.
                partition.position = OffsetAndEpoch(partition.position.offset, fetched.diverging.leader_epoch)
            return None
        if fetched.error == ErrorCode.NONE and not (
            is_known and self._lineage.is_within(partition, position.offset, fetched.high_watermark)
        ):
            return None
        read = read_committed(fetched, position.offset)
        self.foreign_records_read += read.foreign_records
        return None if self._is_misplaced(read) else read

    def _is_misplaced(self, read: PartitionRead) -> bool:
        """Returns whether a record belongs to another metadata partition. Then no metadata partition is believed.

        The topic or the settings had another number of partitions when the record was written. The order of a user
        partition's records is unknown then."""
        if self._home_of is None:
            return False
        number = read.metadata_partition
        for partition in {event.key.topic_id_partition for event in read.events}:
            is_own = partition.topic_id == self._topic.topic_id
            home = partition.partition if is_own else self._home_of(partition)
            if home == number:
                continue
            self._followed.misplaced = (
                f"metadata partition {number} has records of partition {partition.partition} of topic"
                f" {partition.topic_id}, which belong to metadata partition {home} of {self._topic.partition_count}:"
                f" {REBUILD_AFTER_GROWTH}"
            )
            logger.error("the remote log metadata is not followed", extra={"reason": self._followed.misplaced})
            self._followed.doubt_all()
            return True
        return False

    async def _list_offset(self, partition: FollowedPartition, timestamp: int, timeout_ms: int) -> int:
        number = partition.number
        offset = (await self._leadership.offsets({number: partition.leader}, timestamp, timeout_ms)).get(number)
        if offset is None:
            raise BrokerError(f"the leader of metadata partition {number} reports no offset", retriable=True)
        return offset
