"""What may happen to the tier, a step at a time, and what must hold after each: the machine of `test_tier_machine.py`.

Unclean elections happen only where no transaction is open: what a transaction that lost its marker means, is for the
coordinator to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.io_calls import Event, ProcessEnded
from tests.support.fakes.metadata_topic import FakeMetadataTopic, FakeTopicMetadataManager
from tests.support.fakes.tier_process import VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tests.support.tiers.workbench import PARTITION, POLICY
from tests.support.written_log import WrittenLog
from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import NO_TOTAL, TOTAL_KEYS, Retention, TotalRetention
from tiers.errors import LogDivergedError, RemoteLogError, RetriableRemoteStorageError
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.object_key import indexes_key, log_key
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.tasks.partition_watch import violated_bounds

NAMES = ("a", "b")
FIRST_POLICY = replace(POLICY, local_retention_bytes=600, retention_bytes=4000)

policies = st.builds(
    lambda **changes: replace(POLICY, **changes),
    retention_ms=st.sampled_from([-1, -1, 90_000]),
    retention_bytes=st.sampled_from([-1, 1500, 4000]),
    local_retention_ms=st.sampled_from([None, 0, 20_000]),
    local_retention_bytes=st.sampled_from([None, 0, 600]),
    segment_bytes=st.sampled_from([400, 1000, 2000]),
    copy_disable=st.sampled_from([False, False, False, True]),
)


totals = st.sampled_from(
    [NO_TOTAL, TotalRetention(minutes=1), TotalRetention(size_bytes=1500), TotalRetention(2, 4000), TotalRetention(-1)]
)


class Tier(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        (self.root / "remote").mkdir()
        self.clock = Clock()
        self.model = WrittenLog()
        self.log = InMemoryLog()
        self.metadata_log = FakeMetadataTopic(lambda: self.clock.wall_ms, owner="a")
        self.topics = OneTopic(FIRST_POLICY)
        self.policies = [FIRST_POLICY]
        """The topic's settings since the last check. A frozen round keeps the settings of its beginning."""
        self.settings = FIRST_POLICY
        """The settings with the broker's retention, whatever the total is."""
        self.recorded = NO_TOTAL
        self.totals = [NO_TOTAL]
        """The recorded totals since the last check."""
        self.frozen: dict[str, asyncio.Task[None]] = {}
        self.deleted_to = 0
        """By users."""
        self.broker_removed_to = 0
        """By the broker's retention, or by an administrator who asked the broker itself."""
        self.removed: list[tuple[int, int]] = []
        """Offsets, the second one exclusive, that the broker removed when they were not remote: they may be read or
        not. All others from the log start on must be."""
        self.log_start = 0
        self.is_diverged = False
        """The leader's log ends otherwise than what was copied, and no round has seen it yet."""
        self.cut_at = 0
        """The lowest offset at which an unclean election cut the log since the last round that saw one."""
        self.may_have_orphans = False
        """A frozen owner may write an object whose segment its successor has deleted: that is only reported."""

    def run_until_done(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(work)

    @initialize()
    def start(self) -> None:
        self.processes = {name: self.process(name) for name in NAMES}
        for process in self.processes.values():
            self.run_until_done(process.open())

    def process(self, name: str) -> TierProcess:
        return TierProcess(name, self.root, self.log, self.metadata_log, self.topics, self.clock)

    @property
    def owner(self) -> TierProcess:
        return self.processes[self.metadata_log.owner]

    @property
    def follower(self) -> TierProcess:
        return self.processes[next(name for name in NAMES if name != self.metadata_log.owner)]

    def teardown(self) -> None:
        try:
            if hasattr(self, "processes"):
                self.run_until_done(self.end())
        finally:
            self.runner.close()
            self.folder.cleanup()

    async def end(self) -> None:
        try:
            for name in list(self.frozen):
                await self.thaw_and_wait(name)
            await self.recover()
        finally:
            for name, step in self.frozen.items():
                step.cancel()
                await asyncio.wait([step])
                self.frozen = {key: each for key, each in self.frozen.items() if key != name}
            for process in self.processes.values():
                await process.end()

    def appended(self, *batches: bytes) -> None:
        self.log.append(*batches)
        self.log_changed()

    def log_changed(self) -> None:
        self.log.aborted = self.model.aborted()
        self.log.last_stable_offset = self.model.last_stable_offset

    @rule(batches=st.integers(2, 8), records=st.integers(1, 12))
    def produce(self, batches: int, records: int) -> None:
        self.appended(*(self.model.append(records, self.clock.wall_ms) for _ in range(batches)))

    @rule(producer_id=st.integers(1, 2), batches=st.integers(1, 3))
    def produce_in_a_transaction(self, producer_id: int, batches: int) -> None:
        self.appended(*(self.model.append(4, self.clock.wall_ms, producer_id) for _ in range(batches)))

    @precondition(lambda self: self.model.open_transactions())
    @rule(commit=st.booleans(), number=st.integers(0, 1))
    def end_a_transaction(self, commit: bool, number: int) -> None:
        producer_id = sorted(self.model.open_transactions())[number % len(self.model.open_transactions())]
        self.appended(self.model.end_transaction(producer_id, self.clock.wall_ms, commit=commit))

    @rule(by_ms=st.sampled_from([1_000, 4_000, 60_000]))
    def time_passes(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    @rule()
    def elect(self) -> None:
        self.model.leader_epoch += 1
        self.log.leader_epoch += 1

    @precondition(lambda self: self.model.cuts(max(1, self.log.log_start_offset + 1, self.log_start)))
    @rule(percent=st.integers(0, 100), batches=st.integers(0, 8))
    def elect_unclean(self, percent: int, batches: int) -> None:
        """Every replica that may lead has the trimmed records and one more, unless it was emptied or restored.

        It takes records at once."""
        trimmed = self.owner_metadata().state.local_log_start(PARTITION)
        trimmed_to = 0 if trimmed is None else trimmed.offset
        ends = self.model.cuts(max(1, self.log.log_start_offset + 1, self.log_start, trimmed_to))
        if not ends:
            return
        cut = ends[(len(ends) - 1) * percent // 100]
        self.removed = [(first, min(end, cut)) for first, end in self.removed if first < cut]
        self.model.cut(cut)
        self.cut_at = min(cut, self.cut_at) if self.is_diverged else cut
        self.model.leader_epoch += 1
        self.log.elect_unclean(self.model.end_offset)
        self.appended(*(self.model.append(10, self.clock.wall_ms) for _ in range(batches)))
        self.is_diverged = True

    @rule(percent=st.integers(0, 100))
    def delete_records(self, percent: int) -> None:
        """First by the broker, then in the metadata, by whichever proxy. A proxy refuses it of another history."""
        if self.has_what_was_cut():
            return
        offset = max(self.log_start, self.log.log_start_offset, self.log.lso * percent // 100)
        if offset > self.log.lso:
            return
        self.deleted_to = max(self.deleted_to, offset)
        self.log.log_start_offset = max(self.log.log_start_offset, offset)
        proxy = next(each for name, each in self.processes.items() if name not in self.frozen)
        start = LogStart(offset, self.log.leader_epoch, LogStartReason.USER)
        self.run_until_done(proxy.metadata.put_log_start(PARTITION, start))

    @precondition(lambda self: self.settings.retention_ms >= 0)
    @rule()
    def broker_expires(self) -> None:
        oldest_ms = self.clock.wall_ms - self.settings.retention_ms
        expired = [each for each in self.model.batches if each.timestamp_ms < oldest_ms]
        self.broker_removes(expired[-1].last_offset + 1 if expired else 0)

    @rule(percent=st.integers(0, 100))
    def delete_records_behind_our_back(self, percent: int) -> None:
        ends = [each.last_offset + 1 for each in self.model.batches if each.last_offset < self.log.lso]
        if ends:
            self.broker_removes(ends[(len(ends) - 1) * percent // 100])

    def has_what_was_cut(self) -> bool:
        """Whether the remote tier has records that an unclean election took from the leader's log."""
        remote_end = self.owner_metadata().state.remote_end_offset(PARTITION)
        return self.is_diverged and remote_end is not None and remote_end >= self.cut_at

    def broker_removes(self, end: int) -> None:
        """Not before a round has seen an unclean election: a leader cannot tell of records that it has removed."""
        end = min(end, self.log.lso)
        if end <= self.log.log_start_offset or self.has_what_was_cut():
            return
        remote_end = self.owner_metadata().state.remote_end_offset(PARTITION)
        first = max(self.log.log_start_offset, -1 if remote_end is None else remote_end + 1)
        if first < end:
            self.removed.append((first, end))
        self.log.log_start_offset = self.broker_removed_to = end
        for name, process in self.processes.items():
            if name not in self.frozen:
                # A trim of ours waits until every proxy has seen the copy. Before it refuses an offset that the broker
                # removed by itself, a proxy reads the metadata to its end.
                process.metadata.follow()

    @rule(policy=policies)
    def change_settings(self, policy: TopicPolicy) -> None:
        broker = Retention(policy.retention_ms, policy.retention_bytes)
        total = self.recorded.over(broker)
        self.settings = policy
        self.topics.policy = replace(
            policy,
            retention_ms=total.ms,
            retention_bytes=total.size_bytes,
            broker_retention=broker,
            recorded_total=self.recorded,
            tier_settings=self.recorded.config(),
        )
        self.policies.append(self.topics.policy)

    @rule(total=totals, is_read=st.booleans())
    def change_the_total(self, total: TotalRetention, is_read: bool) -> None:
        """Through whichever proxy. Unless `is_read`, the owners' policy has the total before, and expires nothing."""
        proxy = next(each for name, each in self.processes.items() if name not in self.frozen)
        changes: dict[str, str | None] = {**dict.fromkeys(TOTAL_KEYS), **total.config()}
        self.run_until_done(proxy.metadata.change_topic_tier_config(PARTITION.topic_id, PARTITION.topic, changes))
        self.recorded = total
        self.totals.append(total)
        if is_read:
            self.change_settings(self.settings)

    def owner_metadata(self) -> FakeTopicMetadataManager:
        self.owner.metadata.follow()
        return self.owner.metadata

    def owner_runs(self) -> bool:
        return self.metadata_log.owner not in self.frozen

    @precondition(owner_runs)
    @rule(pauses_ms=st.lists(st.sampled_from([0, 0, 4_000, 10_000, 60_000]), min_size=1, max_size=4))
    def rounds(self, pauses_ms: list[int]) -> None:
        for pause_ms in pauses_ms:
            self.clock.advance(pause_ms)
            self.run_until_done(self.round(self.owner))

    @precondition(owner_runs)
    @rule(at=st.integers(0, 60), event=st.sampled_from([Event.KILLED_BEFORE, Event.KILLED_AFTER]))
    def crash_in_a_round(self, at: int, event: Event) -> None:
        self.run_until_done(self.interrupted_round(at, event))

    @precondition(owner_runs)
    @rule(at=st.integers(0, 60), event=st.sampled_from([Event.FAILED_BEFORE, Event.FAILED_AFTER]))
    def fail_in_a_round(self, at: int, event: Event) -> None:
        self.run_until_done(self.interrupted_round(at, event))

    @precondition(lambda self: not self.frozen)
    @rule(at=st.integers(0, 60), event=st.sampled_from([Event.FROZEN_BEFORE, Event.FROZEN_AFTER]))
    def freeze_the_owner_in_a_round(self, at: int, event: Event) -> None:
        """For longer than its membership lasts: the other one takes over."""
        self.run_until_done(self.freeze(self.owner, at, event))

    @precondition(lambda self: self.frozen)
    @rule()
    def thaw(self) -> None:
        for name in list(self.frozen):
            self.run_until_done(self.thaw_and_wait(name))

    @precondition(lambda self: not self.frozen)
    @rule()
    def hand_over(self) -> None:
        self.owner.manager.give_up()
        self.take_over(self.follower)

    @rule(name=st.sampled_from(NAMES), forget=st.booleans())
    def restart(self, name: str, forget: bool) -> None:
        """With its state, or without: it is built anew from the log."""
        if name not in self.frozen:
            self.run_until_done(self.restarted(name, forget=forget))

    @rule()
    def compact_the_metadata(self) -> None:
        self.metadata_log.compact()

    async def round(self, process: TierProcess) -> None:
        before = self.log.log_start_offset
        with contextlib.suppress(LogDivergedError):
            await self.has_more(process)
            assert not process.manager._managed[PARTITION].doubt
            self.is_diverged = False
        self.check_trim(before)

    async def has_more(self, process: TierProcess) -> bool:
        """Does a round. Copying may wait until an attempt was read for the second time."""
        try:
            return await process.manager.round()
        except RetriableRemoteStorageError as error:
            if "copying waits" not in str(error):
                raise
            return False

    async def interrupted_round(self, at: int, event: Event) -> None:
        process = self.owner
        process.calls.arm(at, event)
        with contextlib.suppress(ProcessEnded, RemoteLogError):
            await self.round(process)
        process.calls.disarm()
        if process.calls.is_gone:
            await self.restarted(process.name)

    async def freeze(self, process: TierProcess, at: int, event: Event) -> None:
        process.calls.arm(at, event)

        async def step() -> None:
            with contextlib.suppress(RemoteLogError):
                await self.round(process)

        frozen_step = self.runner.get_loop().create_task(step())  # it outlives this rule
        frozen = self.runner.get_loop().create_task(process.calls.frozen.wait())
        await asyncio.wait([frozen_step, frozen], return_when=asyncio.FIRST_COMPLETED)
        frozen.cancel()
        if frozen_step.done():
            process.calls.disarm()
            frozen_step.result()
            return
        self.frozen[process.name] = frozen_step
        self.may_have_orphans = True
        self.take_over(self.follower)

    async def thaw_and_wait(self, name: str) -> None:
        process = self.processes[name]
        process.calls.thawed.set()
        try:
            await self.frozen[name]
        finally:
            del self.frozen[name]
            process.calls.disarm()
            process.manager.give_up()
            process.metadata.follow()  # as in `broker_removes`

    def take_over(self, process: TierProcess) -> None:
        """It has read the log to its end before it acts."""
        self.metadata_log.owner = process.name
        process.metadata.follow()

    async def restarted(self, name: str, *, forget: bool = False) -> None:
        await self.processes[name].end()
        if forget:
            for file in (self.root / f"{name}-state").iterdir():
                file.unlink()
        self.processes[name] = self.process(name)
        await self.processes[name].open()

    def check_trim(self, before: int) -> None:
        """The newest segment always stays local, and nothing above the last stable offset goes."""
        if self.log.log_start_offset > max(
            before,
            self.deleted_to,
            self.broker_removed_to,
            self.owner_metadata().state.log_start_offset(PARTITION) or 0,
        ):
            end = self.owner_metadata().state.remote_end_offset(PARTITION)
            assert end is not None
            newest = self.owner_metadata().state.remote_log_segment_metadata(PARTITION, end)
            assert newest is not None
            assert self.log.log_start_offset <= min(newest.start_offset, self.log.lso)

    @invariant()
    def everything_is_readable(self) -> None:
        if hasattr(self, "processes"):
            self.run_until_done(self.check())

    async def check(self) -> None:
        metadata = self.owner_metadata()
        self.check_log_start(metadata.state.log_start_offset(PARTITION))
        local = LocalLogBounds(self.log.log_start_offset, self.log.lso, self.log.end_offset, self.log.leader_epoch)
        remote_end = metadata.state.remote_end_offset(PARTITION)
        if not self.is_diverged:
            assert violated_bounds(local, metadata.state.earliest_offset(PARTITION), remote_end) == []
        for name, process in self.processes.items():
            if name in self.frozen:
                continue
            is_owner = process is self.owner
            if not process.metadata.log.is_fresh(PARTITION, VISIBLE_AFTER_MS // 2):
                process.metadata.follow()
            end = self.log.log_start_offset
            if is_owner and not self.is_diverged and remote_end is not None:
                end = max(end, remote_end + 1)
            async with process.reader() as reader:
                for first, last in self.kept(self.log_start, end):
                    await self.model.read_all(reader, first, last)
                if is_owner:
                    await self.model.find_nothing_outside(
                        reader, metadata.state.log_start_offset(PARTITION), remote_end
                    )

    def kept(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs of offsets in [first, end) that the broker did not remove before they were copied."""
        runs = []
        for removed_from, removed_to in sorted(self.removed):
            if first < removed_from < end:
                runs.append((first, removed_from))
            first = max(first, removed_to)
        return [*runs, (first, end)] if first < end else runs

    def check_log_start(self, recorded: int | None) -> None:
        start = self.log.log_start_offset if recorded is None else recorded
        # The copy of the first records may end after the broker has removed them.
        is_copied_late = start >= self.deleted_to and any(first <= start < end for first, end in self.removed)
        assert start >= self.log_start or is_copied_late, "the log start went back"
        if start > max(self.log_start, self.deleted_to, self.broker_removed_to):
            expired = [b for b in self.model.batches if self.log_start <= b.last_offset < start]
            newest_ms = max((batch.timestamp_ms for batch in expired), default=0)
            assert any(
                0 <= policy.retention_ms < self.clock.wall_ms - newest_ms
                or 0 <= policy.retention_bytes <= self.model.size_bytes_from(start)
                for policy in self.policies
                if policy.recorded_total in self.totals
            ), f"[{self.log_start}, {start}) expired too early"
        self.log_start = start
        if not self.frozen:
            self.policies, self.totals = [self.topics.policy], [self.recorded]

    async def copy_all(self) -> None:
        while await self.has_more(self.owner):
            pass

    async def recover(self) -> None:
        """With no more trouble all is copied, and nothing is left over."""
        self.change_settings(FIRST_POLICY)
        for producer_id in list(self.model.open_transactions()):
            self.appended(self.model.end_transaction(producer_id, self.clock.wall_ms, commit=False))
        for name in NAMES:
            await self.restarted(name)
        for _ in range(5):
            await self.copy_all()
            self.clock.advance(POLICY.segment_ms)
        self.is_diverged = False
        await self.check()
        metadata = self.owner_metadata()
        known: list[RemoteLogSegmentMetadata] = list(metadata.state.list_remote_log_segments(PARTITION))
        segments = [one for one in known if one.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED]
        others = [one for one in known if one not in segments]
        assert all(one.is_cut_off for one in others), "an attempt has not ended"
        end = metadata.state.remote_end_offset(PARTITION)
        # Without a readable remote segment the log begins where the leader's log does, whatever lower log start is
        # recorded. A void segment may lie below the log start.
        copied_to = self.log.log_start_offset if end is None or end < self.log_start else end + 1
        # The log may end with a gap, whose records the broker removed before they were copied.
        gap_ends = [gap.next_offset for gap in metadata.state.gaps(PARTITION) if gap.first_offset == copied_to]
        assert max(copied_to, self.log_start, *gap_ends) == self.log.end_offset
        named = {key("cluster", one) for one in segments for key in (log_key, indexes_key)}
        paths = [str(path.relative_to(self.root / "remote")) for path in (self.root / "remote").rglob("*.*")]
        stored = {path for path in paths if path.endswith((".log", ".indexes"))}
        assert named <= stored
        if segments:
            stored_facts = await read_stored_facts(self.processes[NAMES[0]].store, "cluster", PARTITION)
            facts = stored_facts.joined(None)
            assert facts is not None
            assert set(metadata.state.cuts(PARTITION)) <= set(facts.cuts)
            assert set(metadata.state.gaps(PARTITION)) <= set(facts.gaps)
        cut_off = {key("cluster", one) for one in others for key in (log_key, indexes_key)}
        assert stored - cut_off == named or self.may_have_orphans
        await self.follower.store_kept()
        assert self.follower.spooled() == []
