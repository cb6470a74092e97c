"""Planted bugs: one rule of `tiers/` is broken, and the simulation must find it within `WITHIN_SEEDS` seeds.

Every safety rule (docs/design.md) has one at least. Among them are the three losses that the project had once: a hole
that moved the log start, a metadata topic that lost its tail, and a log start that was applied to another history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from tiers.errors import CircuitOpenError, OwnershipLostError, RemoteResourceNotFoundError
from tiers.fitness import Fitness
from tiers.log import broker_log
from tiers.metadata import log_history
from tiers.metadata.partition_facts import facts_of
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic import follower, lineage
from tiers.metadata.topic.followed_partition import FollowedPartition
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.group.membership import GroupMembership
from tiers.metadata.topic.group.ownership import MetadataPartitionOwnership, Tenures
from tiers.metadata.topic.lineage import MetadataLineage
from tiers.metadata.topic.metadata_producer import TransactionalProducer
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.reader.remote_log_reader import CollectedBatches, RemoteLogReader, RemoteReadRequest
from tiers.storage.circuit_breaker import CircuitBreaker
from tiers.tasks.copy import copy_attempts
from tiers.tasks.copy.uncopied import UncopiedRecords
from tiers.tasks.deletion import segment_deletion
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask
from tiers.tasks.history import align, stored_facts, tier_place
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.history.stored_facts import FactsTask, StoredFacts
from tiers.tasks.partition_tasks import PartitionTasks
from tiers.tasks.retention import trim_task
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.retention.trim_task import TrimTask
from tiers.tasks.task_services import TaskServices
from tiers.upkeep import rebuild_plan

WITHIN_SEEDS = 2_000


class PlantedBug(NamedTuple):
    rule: str
    """The safety rule, or the promise."""
    what: str
    plant: Callable[[ExitStack], None]
    kinds: tuple[str, ...] = ()
    """The kinds of faults that show the bug; empty: all kinds."""


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(patch.object(owner, name, value))


async def _nothing(*arguments: Any, **options: Any) -> None:
    return None


async def _yes(*arguments: Any, **options: Any) -> bool:
    return True


def _trims_at_once(stack: ExitStack) -> None:
    original = RemoteLogMetadataStateWriter.seen_at_ms
    _replace(
        stack, RemoteLogMetadataStateWriter, "seen_at_ms",
        lambda self, segment_id: None if original(self, segment_id) is None else -(10**9),
    )  # fmt: skip


def _always_fresh(stack: ExitStack) -> None:
    _replace(stack, MetadataFollower, "is_fresh", lambda self, number, max_age_ms: True)
    _replace(stack, MetadataFollower, "ensure_fresh", _nothing)


def _ignores_divergence(stack: ExitStack) -> None:
    _replace(stack, align, "find_parting", _nothing)
    _replace(stack, copy_attempts, "check_lineage", _nothing)


def _takes_any_store(stack: ExitStack) -> None:
    _replace(stack, tier_place, "_compare", lambda known, found: None)


def _deletes_void(stack: ExitStack) -> None:
    async def all_of_them(self: RLMExpirationTask, policy: Any, log_start: int) -> list[Any]:
        return [each for each in self._finished_apart() if each.is_cut_off]

    _replace(stack, RLMExpirationTask, "_expired_void", all_of_them)


def _deletes_unnamed(stack: ExitStack) -> None:
    original = TaskServices.write_state

    async def write(self: TaskServices, segment: Any, state: RemoteLogSegmentState) -> None:
        if state is not RemoteLogSegmentState.DELETE_SEGMENT_STARTED:
            await original(self, segment, state)

    _replace(stack, TaskServices, "write_state", write)


def _writes_before_the_record(stack: ExitStack) -> None:
    original = RemoteLogMetadataManager.add_remote_log_segment_metadata

    async def add(self: Any, segment: Any) -> None:
        adding = asyncio.create_task(original(self, segment))
        adding.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self.adding = adding

    _replace(stack, RemoteLogMetadataManager, "add_remote_log_segment_metadata", add)


def _trims_the_newest(stack: ExitStack) -> None:
    original = trim_task.covering_segments

    def covering(*arguments: Any) -> Any:
        found = original(*arguments)
        return [*found, *found[-1:]]

    _replace(stack, trim_task, "covering_segments", covering)


def _trims_one_more(stack: ExitStack) -> None:
    original = TrimTask.target

    def target(self: TrimTask, policy: Any, bounds: Any, *more: Any) -> int:
        found = original(self, policy, bounds, *more)
        return found + 1 if bounds.log_start_offset < found < bounds.last_stable_offset else found

    _replace(stack, TrimTask, "target", target)


def _copies_open_transactions(stack: ExitStack) -> None:
    module: Any = broker_log
    fetch, verified = module.fetch_raw, module._verified

    async def uncommitted(client: Any, node_id: int, positions: Any, **options: Any) -> Any:
        return await fetch(client, node_id, positions, **{**options, "isolation_level": 0})

    _replace(stack, broker_log, "fetch_raw", uncommitted)
    _replace(
        stack,
        broker_log,
        "_verified",
        lambda records, offset, lso, partition: verified(records, offset, 1 << 62, partition),
    )


def _hole_moves_log_start(stack: ExitStack) -> None:
    async def behind(self: LogGapTask, hole: Any, bounds: Any) -> bool:
        start = LogStart(hole.next_offset, bounds.leader_epoch, LogStartReason.RETENTION)
        await self._services.metadata.put_log_start(self._partition, start)
        return True

    _replace(stack, LogGapTask, "_behind_hole", behind)


def _forgets_lost_metadata(stack: ExitStack) -> None:
    """Neither the follower nor the stored facts show that the metadata topic lost its tail."""
    _replace(stack, MetadataLineage, "continues", _yes)
    _replace(stack, MetadataLineage, "is_within", lambda self, *arguments: True)
    _replace(stack, MetadataLineage, "out_of_range", lambda self, partition, *rest: lineage._doubt(partition))
    _replace(stack, FactsTask, "check_gap", _nothing)
    _replace(stack, StoredFacts, "lost_reason", _nothing)
    _replace(stack, FactsTask, "has_unknown", _nothing)
    _replace(stack, LogGapTask, "_check_trim", _nothing)


def _buries_copies(stack: ExitStack) -> None:
    original = facts_of

    def facts(log: Any, cluster_id: str, partition: Any, *arguments: Any, **options: Any) -> Any:
        made = original(log, cluster_id, partition, *arguments, **options)
        started = {
            one.segment_id.id
            for one in log.state.list_remote_log_segments(partition)
            if one.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED
        }
        return replace(made, dead=tuple(sorted(started.union(made.dead))))

    _replace(stack, stored_facts, "facts_of", facts)


def _foreign_log_start(stack: ExitStack) -> None:
    _replace(stack, log_history, "confirms_log_start", _yes)


def _trusts_any_clock(stack: ExitStack) -> None:
    _replace(stack, RLMExpirationTask, "_clock_is_trusted", _yes)


def _expires_one_more(stack: ExitStack) -> None:
    original = RLMExpirationTask._expired_to

    def expired(self: RLMExpirationTask, policy: Any, log_start: int, *more: Any) -> int:
        found = original(self, policy, log_start, *more)
        following = list(self._answering(found))
        is_limited = policy.retention_ms >= 0 or policy.retention_bytes >= 0
        return int(following[0].valid_end_offset) + 1 if is_limited and len(following) > 1 else found

    _replace(stack, RLMExpirationTask, "_expired_to", expired)


def _counts_local_twice(stack: ExitStack) -> None:
    """Size retention adds the bytes of the local log to a size that has them (KAFKA-20732)."""
    _replace(stack, UncopiedRecords, "at_least", lambda self: self._replica_bytes or 0)


def _missing_means_deleted(stack: ExitStack) -> None:
    """A segment that the store does not show yet is skipped: the next one answers."""
    original = RemoteLogReader.read

    async def read(self: RemoteLogReader, request: RemoteReadRequest) -> Any:
        segment = self.segment_for(request.partition, request.offset)
        try:
            await self.fetcher.index_once(segment, request.connection_id)
        except RemoteResourceNotFoundError:
            following = self._state.remote_log_segment_metadata(request.partition, segment.valid_end_offset + 1)
            if following is not None:
                request = replace(request, offset=following.start_offset)
        return await original(self, request)

    _replace(stack, RemoteLogReader, "read", read)


def _missing_topic_is_deleted(stack: ExitStack) -> None:
    _replace(stack, TopicDeletionTask, "_proved", lambda self: set(self._missing_since_ms))


def _verifies_nothing(stack: ExitStack) -> None:
    async def read(services: Any, segment: Any, *rest: Any) -> Any:
        return segment

    _replace(stack, copy_attempts, "read_attempt", read)


def _never_asks_the_group(stack: ExitStack) -> None:
    """An owner acts however long ago the group confirmed it.

    No other guard covers it. The coordinators fence the write that records a trim. But a process may stop, or lose the
    coordinator, between that write and DeleteRecords, and it applies a log start that was recorded long ago."""
    _replace(stack, GroupMembership, "is_confirmed", lambda self, max_age_ms: True)


def _writes_unfenced(stack: ExitStack) -> None:
    """A member that lost its partition initializes the producer again, and commits without its generation."""
    _replace(stack, TransactionalProducer, "_commit_offset", _nothing)
    original = MetadataPartitionOwnership.write

    async def write(self: MetadataPartitionOwnership, number: int, records: Any, timeout_ms: int) -> None:
        try:
            await original(self, number, records, timeout_ms)
        except OwnershipLostError:
            made = self._producer(number, f"{self._group_id}-{number}")
            await made.initialize(15_000)
            await made.commit(records(), None, timeout_ms)

    _replace(stack, MetadataPartitionOwnership, "write", write)


def _forgets_aborts(stack: ExitStack) -> None:
    _replace(stack, CollectedBatches, "aborted_transactions", lambda self: ())


def _replays_aborted(stack: ExitStack) -> None:
    module: Any = follower
    original = module.read_committed
    _replace(
        stack, follower, "read_committed",
        lambda fetched, position: original(replace(fetched, aborted_transactions=()), position),
    )  # fmt: skip


def _goes_on_without_tombstones(stack: ExitStack) -> None:
    """A follower that was cut off for long continues from its position."""
    _replace(stack, FollowedPartition, "is_too_old", lambda self, now, max_age_ms: False)


def _drops_at_rebalance(stack: ExitStack) -> None:
    _replace(stack, Tenures, "awaited", lambda self, number: self._held.pop(number, None) and None)


def _works_on_after_a_new_reading(stack: ExitStack) -> None:
    _replace(stack, MetadataFollower, "reading", lambda self: 0)


def _always_fit(stack: ExitStack) -> None:
    _replace(stack, Fitness, "is_fit", True)


def _cuts_too_low(stack: ExitStack) -> None:
    """An unclean election cuts the tier one segment below the common end."""
    module: Any = align
    original = module.align

    async def lower(*arguments: Any) -> Any:
        found = await original(*arguments)
        return None if found is None else found._replace(offset=max(0, found.offset - 10))

    _replace(stack, align, "align", lower)


def _never_probes_a_store(stack: ExitStack) -> None:
    """The circuit breaker for writes stays open for ever."""

    def enter(breaker: CircuitBreaker) -> None:
        if breaker.is_open:
            raise CircuitOpenError("the circuit breaker is open")

    _replace(stack, CircuitBreaker, "__enter__", enter)


def _stages_fail_together(stack: ExitStack) -> None:
    """While one stage of a partition fails, the others wait."""
    original = PartitionTasks.due_ms

    def due_ms(self: PartitionTasks, name: str) -> int:
        if any(stage.failures for other, stage in self.stages.items() if other != name):
            return int(self._services.clock_ms()) + 1_000
        return original(self, name)

    _replace(stack, PartitionTasks, "due_ms", due_ms)


def _stores_no_facts(stack: ExitStack) -> None:
    """What users have deleted, and the gaps, are in the metadata alone."""
    _replace(stack, FactsTask, "for_copy", lambda self, segment_id: b"")
    _replace(stack, FactsTask, "run", _nothing)


def _forgets_at_once(stack: ExitStack) -> None:
    """A deleted segment is forgotten without a second deletion of its objects."""

    async def forget(services: TaskServices, partition: Any, segments: Any, troubles: Any) -> int:
        await services.metadata.forget_deleted_segments([one.segment_id for one in segments])
        return len(segments)

    _replace(stack, segment_deletion, "_forget", forget)


def _restores_all_but_the_last(stack: ExitStack) -> None:
    original = rebuild_plan._take
    _replace(stack, rebuild_plan, "_take", lambda plan, candidates: original(plan, candidates[:-1]))


PLANTED: Mapping[str, PlantedBug] = {
    "trims-at-once": PlantedBug("rule 1", "trims before T_vis has passed", _trims_at_once),
    "always-fresh": PlantedBug("rule 1", "answers from metadata of any age", _always_fresh),
    "ignores-divergence": PlantedBug("rule 2", "never compares leader epochs", _ignores_divergence),
    "deletes-void": PlantedBug("rule 2", "deletes what a CUT voids at once", _deletes_void),
    "cuts-too-low": PlantedBug("rule 2", "cuts the tier below the common end", _cuts_too_low),
    "deletes-unnamed": PlantedBug("rule 3", "deletes objects without a DELETE record", _deletes_unnamed),
    "writes-unnamed": PlantedBug("rule 3", "writes objects before their record", _writes_before_the_record),
    "trims-newest": PlantedBug("rule 4", "trims the newest segment", _trims_the_newest),
    "trims-one-more": PlantedBug("rule 4", "trims one offset too many", _trims_one_more),
    "hole-moves-log-start": PlantedBug("rule 5", "raises the log start past a hole (loss 1)", _hole_moves_log_start),
    "lost-metadata": PlantedBug(
        "rule 5",
        "does not see that metadata was lost (loss 2)",
        _forgets_lost_metadata,
        ("metadata-tail-lost", "power-cut", "old-copy", "rolling-upgrade", "compaction"),
    ),
    "buries-copies": PlantedBug("rule 5", "calls a copy in progress dead in the facts", _buries_copies),
    "foreign-log-start": PlantedBug(
        "rule 5",
        "applies a log start of another history (loss 3)",
        _foreign_log_start,
        ("out-of-date-replica", "unclean-election", "delete-records", "broker-removes", "emptied-replica"),
    ),
    "trusts-any-clock": PlantedBug("rule 6", "expires by a wrong clock", _trusts_any_clock),
    "expires-one-more": PlantedBug("rule 6", "expires one segment too many", _expires_one_more),
    "counts-local-twice": PlantedBug("rule 5", "counts the bytes of the local log twice", _counts_local_twice),
    "missing-is-deleted": PlantedBug("rule 7", "takes an object that is late for deleted", _missing_means_deleted),
    "missing-topic": PlantedBug("rule 5", "takes a missing topic for a deleted one", _missing_topic_is_deleted),
    "verifies-nothing": PlantedBug("promise 4", "does not read back what it wrote", _verifies_nothing),
    "never-asks-the-group": PlantedBug(
        "rule 4", "trims without the group's confirmation", _never_asks_the_group, ("broker-slow",)
    ),
    "writes-unfenced": PlantedBug("rule 4", "writes without a generation, and after it was fenced", _writes_unfenced),
    "goes-on-without-tombstones": PlantedBug(
        "metadata",
        "continues from a position whose tombstones are gone",
        _goes_on_without_tombstones,
        ("cut-off-for-long", "retention"),
    ),
    "rebalance-costs": PlantedBug(
        "ownership", "drops all work at every rebalance", _drops_at_rebalance, ("rebalance",)
    ),
    "works-on-after-a-new-reading": PlantedBug(
        "ownership", "goes on with work that saw a part of the records", _works_on_after_a_new_reading,
        ("clock", "metadata-cut", "retention", "emptied-replica", "unclean-election"),
    ),
    "sick-and-owner": PlantedBug(
        "ownership", "declares itself fit with a full disk", _always_fit, ("disk-full-for-good", "elect")
    ),
    "replays-aborted": PlantedBug("rule 1", "replays the records of aborted transactions", _replays_aborted),
    "forgets-aborts": PlantedBug("promise 3", "hides no aborted transaction", _forgets_aborts),
    "never-probes-a-store": PlantedBug("promise 5", "leaves a store alone for ever that failed", _never_probes_a_store),
    "stages-fail-together": PlantedBug(
        "log range", "stops trims and expiry while copying fails", _stages_fail_together,
        ("unreadable-batch", "retention"),
    ),
    "stores-no-facts": PlantedBug("objects", "stores no facts with its copies or alone", _stores_no_facts),
    "forgets-at-once": PlantedBug(
        "objects", "leaves the objects that come after a deletion", _forgets_at_once,
        ("store-late-puts", "retention"),
    ),
    "restores-too-little": PlantedBug(
        "objects", "does not restore the last segment", _restores_all_but_the_last
    ),
    "takes-any-store": PlantedBug(
        "rule 4", "takes an empty folder for the store", _takes_any_store, ("store-unmounted", "rebalance")
    ),
    "copies-open": PlantedBug("rule 4", "copies beyond the last stable offset", _copies_open_transactions),
}  # fmt: skip


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        PLANTED[name].plant(stack)
        yield
