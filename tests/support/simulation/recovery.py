"""What must hold again after all faults have ended, and within which virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from protocol.errors import ErrorCode
from tests.support.simulation.cluster import CLUSTER_ID, SimPartition
from tiers.fitness import RECOVERY_MS, UNFIT
from tiers.metric_spec import MetricSpec
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.object_key import indexes_key, log_key, parse_segment_key
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.history.log_gap_task import MEMBER_RETURNS_WITHIN_MS
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.upkeep.rebuild import judge_scan, scan_store
from tiers.upkeep.rebuild_plan import PartitionPlan
from tiers.upkeep.runner import HereRunner, OpenedStore

if TYPE_CHECKING:
    from tests.support.simulation.clients import SimClient
    from tests.support.simulation.simulation import Simulation

_STEP_S = 1.0
_HANDED_OVER_S = 30.0
_FIT_AGAIN_S = RECOVERY_MS / 1000 + 15.0
"""A process is fit again within this time after its last fault. Its last failed probe ends within 15 s."""
_RECORDED_WITHIN_S = 15.0
"""How soon after an answered DeleteRecords, or after the faults, the store has the new log start."""
_READ_WITHIN_MS = 5_000
"""How old the metadata may be of a process whose state is compared with what was deleted before."""


async def recover(sim: Simulation, within_s: float) -> None:
    """Waits until the tier works again, then reads everything through every proxy.

    Fails the oracle after `within_s`."""
    full_since_s = [one.full_since_s for one in sim.machines if one.full_since_s is not None]
    if full_since_s:
        # The partitions of that machine are copied elsewhere by then, or their records are overdue.
        await asyncio.sleep(max(0.0, max(full_since_s) + _HANDED_OVER_S - sim.loop.time()))
        await _wait_for_fit_process(sim)
    await asyncio.sleep(max(0.0, sim.cut_off_until_s - sim.loop.time()))
    began_s = sim.loop.time()
    deadline_s = began_s + within_s
    settled = 0
    while settled < 2:
        trouble = _trouble(sim)
        settled = settled + 1 if trouble is None else 0
        if sim.loop.time() >= deadline_s:
            sim.oracle.fail(f"{within_s:.0f} s after the faults ended: {trouble}")
        await asyncio.sleep(_STEP_S)
    sim.note("recovered")
    is_one_history = all(one.histories == 1 and not one.has_other_history for one in sim.oracle.expected.values())
    has_violated_bounds = any(_samples(sim, RemoteLogManagerMetrics.bounds_violations))
    if is_one_history and not sim.oracle.truth.lost_records and has_violated_bounds:
        sim.oracle.fail("a process found a bound between the tiers violated, and the log has one history")
    if not sim.oracle.truth.lost_records:
        _compare_states(sim)
        if any(one.confirmed_deletions for one in sim.oracle.expected.values()):
            # There may have been no owner until the faults ended.
            await asyncio.sleep(max(0.0, began_s + _RECORDED_WITHIN_S - sim.loop.time()))
        await check_rebuild(sim, is_settled=True)
    for producer in sim.producers:
        producer.is_idle = True
    if sim.store.has_truncated or any(one.may_lack_metadata or one.full_since_s is not None for one in sim.machines):
        # The spool of a machine that cannot store it, or does not own it, may have the only copy of some records. The
        # owner waits for it, and then records a gap.
        deadline_s += MEMBER_RETURNS_WITHIN_MS / 1000
    await asyncio.gather(
        *(_read_all(sim, client, deadline_s) for client in sim.clients if client.machine.full_since_s is None)
    )


async def _wait_for_fit_process(sim: Simulation) -> None:
    """Waits until a process is fit, or until one must be.

    While no process is fit, the one on the full disk keeps its share (docs/design.md, "Ownership")."""
    for _ in range(int(_FIT_AGAIN_S / _STEP_S)):
        if 0.0 in _samples(sim, UNFIT):
            return
        await asyncio.sleep(_STEP_S)


def _compare_states(sim: Simulation) -> None:
    """No process may know a segment that was deleted: whoever deleted it has told all, also those that were away."""
    before_s = sim.loop.time() - _READ_WITHIN_MS / 1000
    deleted = {
        one.metadata.segment_id.id
        for one in sim.oracle.truth.segments.values()
        if one.gone_at_s is not None and one.gone_at_s < before_s
    }
    for machine in sim.machines:
        process = machine.process
        if process is None or process.metadata is None or not process.handlers:
            # `_trouble` has waited until every process serves, but for one on a disk that stays full. That one may
            # still be starting: a request over a link that was cut may take the 30 s for which the process waits
            # there. It knows no segment yet, and its clients cannot connect.
            continue
        for partition in sim.oracle.expected:
            place = TopicIdPartition(partition.topic.topic_id, partition.index, partition.topic.name)
            if not process.metadata.is_fresh(place, _READ_WITHIN_MS):
                continue
            known = {one.segment_id.id for one in process.metadata.state.list_remote_log_segments(place)}
            if known & deleted:
                sim.oracle.fail(
                    f"{machine.name} has read the metadata of {partition} to its end, and still knows"
                    f" {len(known & deleted)} segments that were deleted"
                )


class _Objects:
    """The objects of the store as they are now, without its latency and its faults."""

    def __init__(self, sim: Simulation) -> None:
        self._objects = {key: one.data for key, one in sim.store.objects.items()}

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        for key, data in self._objects.items():
            yield StoredObject(key, len(data))

    async def get_object(self, key: str) -> bytes:
        return self._objects[key]

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return self._objects[indexes_key(CLUSTER_ID, metadata)]


async def check_rebuild(sim: Simulation, *, is_settled: bool = False) -> None:
    """If all metadata was lost now, `rebuild` would restore every segment with records that only the store has.

    This holds at any moment of a run, not only after the faults have ended.
    Or it refuses the partition: an operator has to decide between two contents. Or it
    leaves a segment out, and tells that it lies below the log start: a user deleted the records while they were
    copied. They stay deleted, as they are before the metadata is lost. The restored log start and gaps hide no record
    that must be kept.

    After the recovery, `is_settled`, what clients read is the same before and after: see `_check_same`."""
    storage: Any = _Objects(sim)
    scan = await scan_store(OpenedStore(storage, CLUSTER_ID, KeyRing()), HereRunner(), 1)
    plans = {(one.topic_id_partition.topic_id, one.topic_id_partition.partition): one for one in judge_scan(scan).plans}
    for partition, expected in sim.oracle.expected.items():
        place = partition.topic.topic_id, partition.index
        if is_settled and place in plans and not plans[place].refused:
            _check_same(sim, partition, plans[place])
        if _is_stopped(sim, partition) or place not in plans:
            continue
        plan = plans[place]
        if plan.refused:
            continue
        log_start = plan.log_start_offset
        latest = max(plan.log_starts, key=lambda start: (start.leader_epoch, start.offset), default=None)
        is_applied = latest is not None and not sim.oracle.may_be_of_another_history(partition, latest)
        skipped = [(0, log_start)] if is_applied else []
        for first, end in [*skipped, *((gap.first_offset, gap.next_offset) for gap in plan.gaps)]:
            for batch in expected.lacking(first, end, sim.wall_ms()):
                if batch.next_offset <= end:
                    sim.oracle.fail(
                        f"`rebuild` would have clients of {partition} skip {first} to {end - 1}, and the records at"
                        f" {batch.base_offset} must be kept"
                    )
        for one in sim.oracle.truth.finished(place):
            first, last = one.metadata.start_offset, one.metadata.end_offset
            is_deleted = last < log_start and (is_applied or not expected.lacking(first, last + 1, sim.wall_ms()))
            # An earlier attempt may have left a whole copy of the same records.
            is_restored = any(each.start_offset <= first and last <= each.end_offset for each in plan.segments)
            if not is_restored and first < partition.log.start and not is_deleted:
                sim.oracle.fail(
                    f"`rebuild` does not restore {first} to {last} of {partition}, which only the store has"
                )


def _check_same(sim: Simulation, partition: SimPartition, plan: PartitionPlan) -> None:
    """Checks that the restored segments have the records that the store alone has, and none that a user deleted."""
    expected, log_start = sim.oracle.expected[partition], plan.log_start_offset
    if expected.histories > 1 or expected.may_reappear:
        return
    since_s = sim.loop.time() - _RECORDED_WITHIN_S
    deleted_to = expected.confirmed_deleted_to(since_s) if sim.store.failed_at_s < since_s else 0
    logs = [(one, sim.store.objects[log_key(CLUSTER_ID, one)].data) for one in plan.segments]
    for one, _ in logs:
        if log_start <= one.end_offset < deleted_to:
            sim.oracle.fail(
                f"`rebuild` restores {one.start_offset} to {one.end_offset} of {partition}, and a user deleted the"
                f" records below {deleted_to}"
            )
    for batch in expected.lacking(0, partition.log.start, sim.wall_ms()):
        if batch.next_offset <= partition.log.start and not any(batch.data in log for _, log in logs):
            sim.oracle.fail(f"`rebuild` does not restore the records at {batch.base_offset} of {partition}")


def _is_stopped(sim: Simulation, partition: SimPartition) -> bool:
    """Whether an operator has to decide before anything of the partition is trimmed, expires or is deleted."""
    return sim.oracle.expected[partition].has_other_history or bool(sim.oracle.truth.lost_records)


def _is_copied(sim: Simulation, partition: SimPartition) -> bool:
    """Whether an owner copies the partition. A doubt about the past does not end that.

    But a process that has read records which the metadata topic lost does not work on the partitions that the group
    assigns to it, until an operator has decided. A process whose disk stays full also has an alarm, and the group
    assigns nothing to it."""
    healthy = [one for one in sim.machines if one.full_since_s is None]
    readers = [one.process.metadata for one in healthy if one.process is not None]
    are_owners = all(one is not None and one.status().alarm is None for one in readers)
    return are_owners and not sim.oracle.expected[partition].has_other_history


def _trouble(sim: Simulation) -> str | None:
    for machine in sim.machines:
        process = machine.process
        if process is None or not process.handlers:
            if machine.full_since_s is not None:
                continue
            if sim.oracle.truth.lost_records:
                continue
            return f"{machine.name} does not serve: {machine.ended_with[-1:]}"
    now_ms = sim.wall_ms()
    segment_ms = sim.settings["topics"][0]["segment.ms"]
    for partition, expected in sim.oracle.expected.items():
        if not _is_copied(sim, partition):
            continue
        if partition.leader < 0:
            return f"{partition} has no leader"
        finished = sim.oracle.truth.finished((partition.topic.topic_id, partition.index))
        remote_end = max((one.metadata.end_offset + 1 for one in finished), default=0)
        late = [
            one
            for one in expected.batches
            if one.base_offset >= max(remote_end, partition.log.start)
            and now_ms - one.timestamp_ms > segment_ms + 15_000
            and one.next_offset <= partition.log.last_stable_offset
            and partition.unreadable_at < 0
        ]
        if late:
            return f"{partition} is copied to {remote_end} only, and {late[0].base_offset} is old"
        if _is_stopped(sim, partition):
            continue
        overdue = _overdue(sim, partition)
        if overdue is not None:
            return overdue
        local = sum(len(one.data) for one in partition.log.batches if one.next_offset <= remote_end)
        if (
            local > 6_000
            and not _has_uncopied(sim, partition)
            and sim.settings["topics"][0]["local.retention.bytes"] >= 0
        ):
            return f"{partition} keeps {local} copied bytes local"
    return None if sim.oracle.truth.lost_records else _left_behind(sim)


def _left_behind(sim: Simulation) -> str | None:
    """Returns an object that came after the deletion of its segment. The owner deletes it once more."""
    if sim.loop.time() < sim.store.late_until_s:
        return "a late write has not arrived yet"
    for key in sim.store.objects:
        parsed = parse_segment_key(key)
        segment = None if parsed is None else sim.oracle.truth.segments.get(parsed.segment_uuid)
        if segment is not None and segment.gone_at_s is not None:
            return f"{key} is still there, {sim.loop.time() - segment.gone_at_s:.0f} s after its segment was deleted"
    return None


def _has_uncopied(sim: Simulation, partition: SimPartition) -> bool:
    """Whether the leader has records again that were removed before they were copied: they end the trimming."""
    finished = [one.metadata for one in sim.oracle.truth.finished((partition.topic.topic_id, partition.index))]
    remote_end = max((one.end_offset for one in finished), default=-1)
    offset = partition.log.start
    for one in sorted(finished, key=lambda each: each.start_offset):
        if one.start_offset <= offset:
            offset = max(offset, one.end_offset + 1)
    return offset <= remote_end


def _overdue(sim: Simulation, partition: SimPartition) -> str | None:
    """Returns what the topic's retention should have removed from the remote tier.

    While a member may return with the only copy of some records, the records behind them stay."""
    place = partition.topic.topic_id, partition.index
    retention = sim.oracle.expected[partition].retentions[-1]
    finished = [one for one in sim.oracle.truth.finished(place) if not one.is_cut]
    ranges = [(one.metadata.start_offset, one.metadata.end_offset) for one in finished]
    begun = (one.metadata.start_offset for one in sim.oracle.truth.unfinished(place))
    may_return = any(
        at < partition.log.start and not any(first <= at <= last for first, last in ranges) for at in begun
    )
    if len(finished) < 2 or may_return:
        return None
    age_ms = sim.wall_ms() - finished[0].metadata.max_timestamp_ms
    if 0 <= retention.ms < age_ms - 15_000:
        return (
            f"{partition} keeps offset {finished[0].metadata.start_offset}, which expired {age_ms} ms after its write"
        )
    size = sum(one.metadata.segment_size_bytes for one in finished)
    if 0 <= retention.size_bytes < size - 5_000:
        return f"{partition} keeps {size} bytes, and its retention is {retention.size_bytes}"
    return None


def _samples(sim: Simulation, spec: MetricSpec[Any, Any]) -> list[float]:
    """Returns the values of a metric in the processes that run."""
    return [
        sample.value
        for machine in sim.machines
        if machine.process is not None
        for metric in machine.process.registry.collect()
        for sample in metric.samples
        if sample.name == spec.exposed_name
    ]


async def _read_all(sim: Simulation, client: SimClient, deadline_s: float) -> None:
    """Reads the whole log as a consumer does."""
    partition = client.partition
    expected = sim.oracle.expected[partition]
    client.is_checking = True
    await client.is_idle.wait()
    await client.ask_for_earliest()
    client.position = expected.log_start(sim.wall_ms())
    if _is_stopped(sim, partition) or expected.has_other_history or partition.unreadable_at >= 0:
        for _ in range(10):
            await client.step(100_000)
        return
    failures = 0
    # A leader that came back may have a transaction whose end the leader in between has written.
    while client.position < min(expected.end, partition.log.last_stable_offset):
        before = client.position
        await client.step(100_000)
        if client.position > before:
            failures = 0
            continue
        failures += 1
        if not expected.lacking(client.position, expected.end, sim.wall_ms()):
            return
        if sim.loop.time() >= deadline_s:
            code = client.last_code
            said = "no answer" if code == -1 else "nothing" if code == ErrorCode.NONE else f"error {code}"
            sim.oracle.fail(
                f"a client of {client.machine.name} reads {partition} at {client.position} of {expected.end} and gets"
                f" {said}, after all faults have ended"
            )
        await asyncio.sleep(0.3)
