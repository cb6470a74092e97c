"""`Oracle`: what must hold after every step of a simulated cluster. The first thing that does not is a `Violation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from protocol.errors import ErrorCode
from protocol.records.gap_batch import gap_batch
from protocol.records.record_batch import RecordBatch, iterate_batches
from tests.support.read_committed import FILTERS
from tests.support.simulation import unfinished
from tests.support.simulation.cluster import CLUSTER_ID, SimBroker, SimCluster, SimPartition
from tests.support.simulation.expectation import ExpectedPartition, Retention
from tests.support.simulation.fetches import FETCH_VERSION
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.replica_log import ABORT, Batch
from tests.support.simulation.store import SimStore, decoded_facts, stored_facts
from tests.support.simulation.truth import MetadataTruth, Place, TrueSegment
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.log_start import LogStart, OffsetAndEpoch
from tiers.storage.object_key import (
    indexes_key,
    log_key,
    parse_facts_key,
    parse_segment_key,
    partition_prefix,
)

UNAVAILABLE = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_ID,
    }
)
"""The errors that every client retries."""

HEAD_GRACE_S = 30.0
"""Within this time after the last fault, an owner has listed the objects of a partition whose metadata was lost."""
_LISTED_WITHIN_S = 5.0
"""An owner tries again within this time to list the store."""
_CONFIRMED_WITHIN_S = 2.001
"""Processes count whole milliseconds."""


class Violation(Exception):
    """Something happened that must never happen."""


class Oracle:
    def __init__(
        self,
        loop: VirtualLoop,
        cluster: SimCluster,
        store: SimStore,
        wall_ms: Callable[[], int],
        visible_after_ms: int,
        is_tidegate: Callable[[str], bool],
    ) -> None:
        self.loop = loop
        self.cluster = cluster
        self.store = store
        self.wall_ms = wall_ms
        self.truth = MetadataTruth(loop)
        self.expected: dict[SimPartition, ExpectedPartition] = {}
        self.violation: Violation | None = None
        self.reads = 0
        self.remote_reads = 0
        self.trims = 0
        self.deletions = 0
        self.confirmed_s: Callable[[str], float] = lambda client: 0.0
        """When the group last confirmed a process as a member of the present generation."""
        self.calm_since_s: float | None = None
        """When the last fault ended; None: faults go on."""
        self._copied: set[str] = set()
        """The keys of the log objects whose upload has begun."""
        self.on_metadata_cut: list[Callable[[int, int], None]] = []
        self._visible_after_ms = visible_after_ms
        self._is_tidegate = is_tidegate
        cluster.on_committed = self._committed
        cluster.on_lost = self._lost
        cluster.on_removed = self.broker_removes
        store.on_delete = self._deleting
        store.on_put = self._putting
        store.on_copy = self._copying
        self.truth.on_log_start = self._log_start
        self.truth.on_trim_recorded = self._trim_recorded
        self.truth.on_started = self._started
        self.truth.on_begun_again = self._begun_again
        self.truth.on_total = self._total_recorded
        self.has_rebalances_only = False
        """Whether the plan has no fault but rebalances. Then nothing may be copied twice."""

    def fail(self, text: str) -> None:
        violation = Violation(f"at {self.loop.time():.3f} s: {text}")
        if self.violation is None:
            self.violation = violation
        raise violation

    def expect(self, partition: SimPartition, retention: Retention) -> None:
        self.expected[partition] = ExpectedPartition(str(partition), [retention])

    # What the cluster does

    def _committed(self, partition: SimPartition, before: int) -> None:
        log = partition.log
        expected = self.expected.get(partition)
        if expected is None:
            if partition.topic.name == "__remote_log_metadata":
                self.truth.follow(partition)
            return
        first = len(log.batches)
        while first and log.batches[first - 1].base_offset >= expected.end:
            first -= 1
        for batch in log.batches[first:]:
            if expected.end <= batch.base_offset and batch.next_offset <= log.high_watermark:
                expected.commit(batch)

    def _lost(self, partition: SimPartition, old_end: int) -> None:
        log, expected = partition.log, self.expected.get(partition)
        if expected is None:
            self.truth.lost(partition, log.end)
            for tell in self.on_metadata_cut:
                tell(partition.index, log.end)
            return
        before = expected.histories
        expected.cut(log.batches, log.start, log.end, self.loop.time())
        if expected.histories > before and log.end < expected.trimmed_to:
            expected.has_other_history = True

    def broker_removes(self, partition: SimPartition, end: int) -> None:
        """Called before a broker removes records by itself or for an administrator, and before it loses its leadership
        to a replica that lacks them."""
        expected = self.expected.get(partition)
        if expected is None:
            return
        expected.trimmed_to = max(expected.trimmed_to, end)
        place = partition.topic.topic_id, partition.index
        finished = self.truth.finished(place)
        copies = [unfinished.whole_log(self.store, one) or b"" for one in self.truth.unfinished(place)]
        for batch in partition.log.batches:
            if batch.base_offset >= end:
                break
            first, last = batch.base_offset, batch.next_offset - 1
            is_copied = any(_holds(one, first, last) for one in finished)
            if not (is_copied or any(batch.data in log for log in copies)):
                expected.removed.append((first, batch.next_offset))

    # What Tidegate does

    def asking_to_trim(self, client: str) -> None:
        """Called when a process sends a DeleteRecords of its own, however long the request is on its way."""
        confirmed_ago_s = self.loop.time() - self.confirmed_s(client)
        if confirmed_ago_s > _CONFIRMED_WITHIN_S:
            self.fail(f"{client} asks a broker to trim, and the group confirmed it {confirmed_ago_s:.1f} s ago")

    def trimming(self, partition: SimPartition, broker: SimBroker, offset: int, client: str) -> None:
        """Called before a DeleteRecords. Checks those of Tidegate itself."""
        expected = self.expected.get(partition)
        if expected is None or not self._is_tidegate(client):
            return
        log = partition.replicas[broker.node_id]
        if offset <= log.start:
            return
        expected.trimmed_to = max(expected.trimmed_to, offset)
        self.trims += 1
        now_ms, now_s = self.wall_ms(), self.loop.time()
        place = partition.topic.topic_id, partition.index
        segments = self.truth.finished(place)
        is_true_leader = partition.leader == broker.node_id
        if offset > log.last_stable_offset:
            self.fail(f"{client} trims {partition} to {offset}, beyond the LSO {log.last_stable_offset}")
        # Users may have deleted the first records of a batch.
        kept_from = max(log.start, expected.deleted_to if is_true_leader else expected.deleted_of(log.batches))
        lacking = [
            one
            for one in log.batches
            if one.base_offset < offset and one.next_offset > kept_from and not expected.may_be_gone(one, now_ms)
        ]
        if kept_from >= offset:
            lacking = []
        for batch in lacking:
            if not is_true_leader and batch.data not in expected.ever.get(batch.base_offset, ()):
                continue
            first, last = max(batch.base_offset, kept_from), min(batch.next_offset, offset) - 1
            holding = [one for one in segments if _holds(one, first, last)]
            if not holding:
                self.fail(
                    f"{client} trims {partition} to {offset}: no finished segment has the offsets {first} to {last}"
                )
            visible_s = min(one.finished_at_s or now_s for one in holding)
            if (now_s - visible_s) * 1000 < self._visible_after_ms - 1 and partition.topic.topic_id is not None:
                self.fail(
                    f"{client} trims {partition} to {offset}, {1000 * (now_s - visible_s):.0f} ms after the copy of"
                    f" {batch.base_offset} was committed"
                )
            if not any(self._has_bytes(one, batch) for one in holding):
                self.fail(f"{client} trims {partition} to {offset}: the store does not have the batch {batch[:3]}")
        newest = max((one.metadata.start_offset for one in segments), default=0)
        if lacking and offset > newest:
            self.fail(f"{client} trims {partition} to {offset}, and the newest segment begins at {newest}")

    def _has_bytes(self, segment: TrueSegment, batch: Batch) -> bool:
        stored = self.store.objects.get(log_key(CLUSTER_ID, segment.metadata))
        indexes = self.store.objects.get(indexes_key(CLUSTER_ID, segment.metadata))
        return stored is not None and indexes is not None and batch.data in stored.data

    def _putting(self, key: str, client: str, data: bytes) -> None:
        if parse_facts_key(key) is not None:
            self._calling_dead(client, data)
            if key in self.store.objects:
                self.fail(f"{client} replaces {key}")
        parsed = parse_segment_key(key)
        if parsed is not None and parsed.segment_uuid not in self.truth.segments:
            self.fail(f"{client} writes {key}, whose segment has no record")

    def _copying(self, key: str, client: str) -> None:
        """An upload that is in progress during a rebalance goes on."""
        if self.has_rebalances_only and key in self._copied:
            self.fail(f"{client} uploads {key} again, after a rebalance that reassigned nothing")
        self._copied.add(key)

    def _calling_dead(self, client: str, data: bytes) -> None:
        """`rebuild` restores no dead segment. So no facts call one dead that may still be finished."""
        for dead in decoded_facts(data).dead:
            segment = self.truth.segments.get(dead)
            if segment is not None and not self.truth.may_be_dead(segment):
                self.fail(f"{client} stores facts that call {dead} dead, whose segment has no DELETE record")

    def _started(self, segment: TrueSegment) -> None:
        """A segment that is in progress during a rebalance is copied once, by the owner that began it."""
        if not self.has_rebalances_only:
            return
        for other in self.truth.segments.values():
            is_of_the_same = other.metadata.topic_id_partition == segment.metadata.topic_id_partition
            overlaps = other.metadata.end_offset >= segment.metadata.start_offset
            if other is not segment and is_of_the_same and overlaps:
                self.fail(
                    f"{segment.metadata.topic_id_partition} is copied twice from offset"
                    f" {segment.metadata.start_offset} on, after a rebalance that reassigned nothing"
                )

    def _begun_again(self, segment: TrueSegment) -> None:
        """A DELETE that is late would delete the objects of the new copy."""
        uuid = segment.metadata.segment_id.id
        self.fail(f"the deletion of {uuid} has begun, and a copy begins with the same uuid")

    def _deleting(self, key: str, client: str) -> None:
        parsed = parse_segment_key(key)
        if parsed is None:
            return
        if key in self.store.objects:
            self.deletions += 1
        segment = self.truth.segments.get(parsed.segment_uuid)
        if segment is None or not segment.is_deleted:
            self.fail(f"{client} deletes {key}, whose segment has no DELETE record")
        assert segment is not None
        partition = self._partition(parsed.topic_id, parsed.partition)
        if partition is None or key not in self.store.objects:
            return
        if segment.finished_at_s is None:
            unfinished.check_deleted(self, partition, segment, client)
        else:
            self._check_deleted(partition, segment, client)

    def _check_deleted(self, partition: SimPartition, segment: TrueSegment, client: str) -> None:
        """Checks that no record is lost with a finished segment."""
        expected, now_ms = self.expected[partition], self.wall_ms()
        first, last = segment.metadata.start_offset, segment.metadata.end_offset
        stored = self.store.objects.get(log_key(CLUSTER_ID, segment.metadata))
        others = [one for one in self.truth.finished((partition.topic.topic_id, partition.index)) if one is not segment]
        for batch in expected.lacking(first, last + 1, now_ms):
            if stored is not None and batch.data not in stored.data:
                continue
            begins_at = max(batch.base_offset, first, expected.deleted_to)
            if self.truth.lost_records and partition.log.start <= begins_at:
                continue  # the metadata does not know any more that the copy was finished, and it was not trimmed yet
            if begins_at > last or any(_holds(one, begins_at, min(batch.next_offset - 1, last)) for one in others):
                continue
            self.fail(
                f"{client} deletes segment {first} to {last} of {partition} with offset {batch.base_offset}, whose"
                " records must be kept"
            )
        if self.truth.lost_records and not segment.is_cut:
            return  # as above: the metadata does not know any more that the copy was finished, and no CUT voids it
        leader_epoch = segment.metadata.segment_leader_epochs[-1].epoch
        for cut in expected.cuts:
            # A segment of another epoch is of a history before the one that was cut, or after it.
            is_of_cut_history = cut.lowest_epoch <= leader_epoch <= cut.highest_epoch
            is_cut = is_of_cut_history and max(first, cut.first) < min(last + 1, cut.end)
            is_kept = last >= max(expected.deleted_to, cut.deleted_to)
            if is_cut and is_kept and not self._may_have_expired(expected, segment, now_ms):
                self.fail(f"{client} deletes segment {first} to {last} of {partition}, which a CUT voids")

    def _may_have_expired(self, expected: ExpectedPartition, segment: TrueSegment, now_ms: int) -> bool:
        return any(
            0 <= one.ms < now_ms + expected.tolerance_ms - segment.metadata.max_timestamp_ms or one.size_bytes >= 0
            for one in expected.retentions
        )

    def _log_start(self, place: Place, start: LogStart) -> None:
        """A log start that deletes must have a reason."""
        partition = self._partition(*place)
        if partition is None or not start.deletes:
            return
        expected, now_ms = self.expected[partition], self.wall_ms()
        if self.may_be_of_another_history(partition, start):
            return
        kept = [one for one in expected.batches if one.next_offset <= start.offset]
        for batch in kept:
            if not expected.may_be_gone(batch, now_ms):
                self.fail(
                    f"the log start of {partition} moves to {start.offset} ({start.reason.name}), beyond offset"
                    f" {batch.base_offset}, whose records must be kept"
                )

    def metadata_is_lost(self) -> None:
        """A total that the owner has not stored with any facts yet may be lost."""
        for partition, expected in self.expected.items():
            place = TopicIdPartition(partition.topic.topic_id, partition.index)
            facts = stored_facts(self.store, partition_prefix(CLUSTER_ID, place))
            if expected.has_own_total and not any(each.tier_config for each in facts):
                expected.lose_own_total()

    def _total_recorded(self, topic_id: UUID) -> None:
        for partition, expected in self.expected.items():
            if partition.topic.topic_id == topic_id:
                expected.take_own_total(self.wall_ms())

    def _trim_recorded(self, place: Place, start: OffsetAndEpoch) -> None:
        """The owner records a trim before it asks the broker, and then counts the trim as done."""
        partition = self._partition(*place)
        if partition is None:
            return
        expected = self.expected[partition]
        if start.leader_epoch == partition.leader_epoch:
            expected.trimmed_to = max(expected.trimmed_to, start.offset)
        elif any(cut.first < start.offset for cut in expected.cuts):
            expected.has_other_history = True

    def may_be_of_another_history(self, partition: SimPartition, start: LogStart) -> bool:
        """Whether the leader may not confirm a log start. It deletes nothing then."""
        return start.leader_epoch < partition.leader_epoch and self.expected[partition].histories > 1

    def _partition(self, topic_id: UUID, index: int) -> SimPartition | None:
        return next((one for one in self.expected if one.topic.topic_id == topic_id and one.index == index), None)

    # What clients see

    def asked(self, partition: SimPartition) -> Asked:
        expected = self.expected[partition]
        known_since_s = self.loop.time() - self._visible_after_ms / 2000
        return Asked(expected.histories, expected.end, expected.confirmed_deleted_to(known_since_s))

    def answered(
        self, partition: SimPartition, offset: int, asked: Asked, answer: Any, reader: str, *, may_lack_metadata: bool
    ) -> int:
        """Checks the answer to a Fetch at `offset`. Returns the next offset to ask for.

        A proxy that `may_lack_metadata` had not read records that the metadata topic lost, or has forgotten them."""
        expected, now_ms = self.expected[partition], self.wall_ms()
        self.reads += 1
        code = answer.error_code
        is_same = asked.histories == expected.histories
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            log_start = expected.log_start(now_ms)
            is_below = offset < log_start
            is_above = offset > asked.high_watermark or not is_same or answer.is_out_of_date
            is_unaware = may_lack_metadata and self._may_not_know_its_head(partition, log_start)
            if not (is_below or is_above or is_unaware) and not expected.has_other_history:
                self.fail(
                    f"{reader}: offset {offset} of {partition} is in [{log_start}, {expected.end}] and was answered"
                    " OFFSET_OUT_OF_RANGE"
                )
            return log_start if is_below or is_unaware else min(offset, expected.end)
        if code != ErrorCode.NONE:
            if code not in UNAVAILABLE:
                self.fail(f"{reader}: offset {offset} of {partition} was answered error {code}")
            return offset
        if answer.diverging:
            return min(int(answer.diverging), expected.end)
        return self._check_records(partition, offset, answer, reader, asked)

    def answered_earliest(
        self, partition: SimPartition, asked: Asked, code: int, offset: int, reader: str, *, may_lack_metadata: bool
    ) -> None:
        """Checks the answer to a ListOffsets for the earliest offset."""
        expected = self.expected[partition]
        if code:
            if code not in UNAVAILABLE and code != ErrorCode.REQUEST_TIMED_OUT:
                self.fail(f"{reader}: the earliest offset of {partition} was answered error {code}")
            return
        log_start = expected.log_start(self.wall_ms())
        is_unaware = may_lack_metadata and self._may_not_know_its_head(partition, log_start)
        is_judged = asked.histories == expected.histories and not expected.has_other_history and not is_unaware
        if offset > log_start and is_judged:
            self.fail(f"{reader}: the earliest offset of {partition} was answered {offset}, and it is {log_start}")

    def _may_not_know_its_head(self, partition: SimPartition, log_start: int) -> bool:
        """Whether the metadata lost all segments of the log, and no owner had `HEAD_GRACE_S` to list the store.

        Until then the answers below the broker's log are the broker's. While the store fails, copies that follow there
        do not end that: the owner could not list it before them."""
        fails = self.loop.time() - self.store.failed_at_s < _LISTED_WITHIN_S
        known = [
            one
            for one in self.truth.finished((partition.topic.topic_id, partition.index))
            if not one.is_forgotten and (one.started_at_s <= self.truth.lost_at_s or not fails)
        ]
        is_head = all(one.metadata.end_offset < log_start for one in known)
        is_early = self.calm_since_s is None or self.loop.time() < self.calm_since_s + HEAD_GRACE_S
        return bool(self.truth.lost_records) and is_head and is_early

    def _check_records(self, partition: SimPartition, offset: int, answer: Any, reader: str, asked: Asked) -> int:
        expected, now_ms = self.expected[partition], self.wall_ms()
        records = bytes(answer.records)
        if not records:
            return offset
        if answer.is_remote:
            self.remote_reads += 1
        position = offset
        seen = []
        for batch in iterate_batches(records):
            raw = records[batch.start : batch.end]
            is_across_gap = batch.is_control and raw == _gap_batch(offset, batch)
            if not is_across_gap:
                seen.append(batch)
            if batch.last_offset < position:
                if batch.last_offset < offset and position == offset:
                    continue
                self.fail(f"{reader}: {partition} answered offset {batch.last_offset} twice or out of order")
            begins_at = batch.last_offset + 1 if is_across_gap else batch.base_offset
            if begins_at > position:
                skipped = expected.lacking(position, begins_at, now_ms)
                if skipped and asked.histories == expected.histories:
                    self.fail(
                        f"{reader}: {partition} skipped offsets {skipped[0].base_offset} to"
                        f" {skipped[-1].next_offset - 1}: {position} was asked for, and {begins_at} came"
                    )
            if is_across_gap:
                position = begins_at
                continue
            is_deleted = batch.last_offset < asked.deleted_to and expected.histories == 1
            may_reappear = expected.may_reappear or answer.is_from_old_leader
            if is_deleted and not may_reappear and not self.truth.lost_records:
                self.fail(f"{reader}: {partition} answered offset {batch.last_offset}, which a user has deleted")
            if raw not in expected.ever.get(batch.base_offset, ()):
                self.fail(f"{reader}: {partition} answered other bytes than were written at {batch.base_offset}")
            true = expected.batch_at(batch.base_offset)
            is_true = true is not None and true.data == raw
            if not is_true and expected.histories == 1:
                self.fail(f"{reader}: {partition} answered records of another history at {batch.base_offset}")
            position = batch.last_offset + 1
        if expected.histories == 1 and answer.aborted is not None:
            self._check_visible(partition, records, seen, answer.aborted, reader)
        return position

    def _check_visible(
        self, partition: SimPartition, records: bytes, seen: list[Any], aborted: Any, reader: str
    ) -> None:
        hidden = _hidden(self.expected[partition].batches)
        wanted = [one.base_offset for one in seen if one.base_offset not in hidden]
        listed = [AbortedTransaction(producer_id, first) for producer_id, first in aborted]
        for shown in FILTERS:
            visible = [one.base_offset for one in shown(records, seen, listed)]
            if visible != wanted:
                self.fail(f"{reader}: {partition} shows a committed reader {visible} instead of {wanted}")


class Asked(NamedTuple):
    """What was true when a reader asked."""

    histories: int
    high_watermark: int
    deleted_to: int
    """Up to where every proxy must know of a deletion: its metadata may be T_vis / 2 old."""


def _gap_batch(fetch_offset: int, batch: RecordBatch) -> bytes | None:
    """Returns the proxy's own batch that would take the client to the end of `batch`. None: there is none."""
    next_offset = batch.last_offset + 1
    if not 0 < fetch_offset < next_offset:
        return None
    return gap_batch(FETCH_VERSION, fetch_offset, next_offset, batch.leader_epoch)


def _holds(segment: TrueSegment, first: int, last: int) -> bool:
    return segment.metadata.start_offset <= first and segment.metadata.end_offset >= last


def _hidden(batches: list[Batch]) -> set[int]:
    """Returns the base offsets of the batches that a read_committed client does not see, markers included."""
    hidden: set[int] = set()
    open_batches: dict[int, list[int]] = {}
    for batch in batches:
        if batch.ends:
            hidden.add(batch.base_offset)
            own = open_batches.pop(batch.producer_id, [])
            if batch.ends == ABORT:
                hidden.update(own)
        elif batch.producer_id >= 0:
            open_batches.setdefault(batch.producer_id, []).append(batch.base_offset)
    return hidden
