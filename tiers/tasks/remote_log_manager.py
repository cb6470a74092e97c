"""`RemoteLogManager` runs the leader tasks of every partition that this process owns (docs/founding.md, "RLM tasks").

* A round surveys a partition, moves the log start, and starts the stages that need the store: copy, trim and deletion.
  They run beside the rounds, so that a store that hangs holds up no log start.
* A stage is due again after the interval, at once when more is ready to be copied, or after its own backoff.
* Every kind of work has places of its own: `manager_pool_size` for rounds, for trims and for deletions,
  `copier_pool_size` for copies. So work that hangs never occupies what other kinds need.
* `run` lives in the caller's TaskGroup. After `stop` no round begins, and the work in progress has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from tiers.bounded_gather import each_alone, in_turns
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import LogDivergedError, OwnershipLostError, Peer, RemoteLogError
from tiers.lasting_trouble import LastingTrouble
from tiers.metadata.metadata_log import begin_in
from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import ActiveAlarm
from tiers.tasks.copy.copy_attempts import store_for_its_owner
from tiers.tasks.copy.spool import SpoolError
from tiers.tasks.deletion.remote_disable import delete_disabled
from tiers.tasks.deletion.segment_deletion import forget_deleted_segments
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask
from tiers.tasks.partition_tasks import PartitionReport, PartitionTasks
from tiers.tasks.retention.total_retention import TotalRetentionTask
from tiers.tasks.task_services import TaskServices

_OWNERSHIP_INTERVAL_MS = 1_000
_WATCH_INTERVAL_MS = 5_000
_WITH_PLACES = ("copy", "trim", "deletion")
"""The stages that run beside the rounds, in places of their own. Expiry runs in the place of the round."""
_STAGES_OF_A_ROUND = ("expiry", *_WITH_PLACES)
_URGENT = "urgent"
"""The places for copies of records that a broker removes soon. They do not wait for copies that can wait."""
_PARTITIONS_OF_A_TURN = 64
logger = logging.getLogger(__name__)


class _Due(NamedTuple):
    """Work that is to be looked at. Of two of one time, the one with the lower number comes first."""

    at_ms: int
    number: int
    kind: str
    tasks: PartitionTasks


class _Schedule:
    """The times at which kinds of work of the partitions are to be looked at: one time for each kind and partition.

    A step costs the logarithm of the number of partitions."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._heaps: dict[str, list[_Due]] = {kind: [] for kind in kinds}
        """An entry is out of date if `_at_ms` has another time, or none."""
        self._at_ms: dict[tuple[str, PartitionTasks], int] = {}
        self._numbers = count()

    def put(self, kind: str, tasks: PartitionTasks, at_ms: int) -> None:
        """Replaces the time of the partition's work of this kind."""
        if self._at_ms.get((kind, tasks)) != at_ms:
            self._at_ms[kind, tasks] = at_ms
            heapq.heappush(self._heaps[kind], _Due(at_ms, next(self._numbers), kind, tasks))

    def drop(self, tasks: PartitionTasks) -> None:
        """Removes all times of the partition."""
        for kind in self._heaps:
            self._at_ms.pop((kind, tasks), None)

    def first(self, kinds: Iterable[str]) -> _Due | None:
        """Returns the earliest work of these kinds; None without any."""
        heaps = [self._heaps[kind] for kind in kinds]
        for heap in heaps:
            while heap and self._at_ms.get((heap[0].kind, heap[0].tasks)) != heap[0].at_ms:
                heapq.heappop(heap)
        return min((heap[0] for heap in heaps if heap), default=None)


class TopicPolicies(Protocol):
    """The part of `TieredTopics` that the manager uses."""

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]: ...

    async def refresh(self, timeout_ms: int) -> object: ...


class RemoteLogManager:
    def __init__(
        self,
        services: TaskServices,
        topics: TopicPolicies,
        topic_deletion: TopicDeletionTask | None = None,
    ) -> None:
        """Constructs the manager. Without `topic_deletion`, the remote logs of deleted topics stay."""
        self._services = services
        self._topics = topics
        self._topic_deletion = topic_deletion
        self._managed: dict[TopicIdPartition, PartitionTasks] = {}
        self._ending: dict[TopicIdPartition, PartitionTasks] = {}
        """The partitions that were given up while work on them was in progress. It is being cancelled."""
        remote_log = services.settings.remote_log
        self._sizes = dict.fromkeys(("survey", *_WITH_PLACES), remote_log.manager_pool_size)
        self._sizes["copy"] = self._sizes[_URGENT] = remote_log.copier_pool_size
        self._places: dict[str, set[PartitionTasks]] = {name: set() for name in self._sizes}
        """Which partitions have a place for a kind of work. A round reserves the places of what it will start."""
        self._schedule = _Schedule((*_STAGES_OF_A_ROUND, _URGENT))
        """The stages for which a round may begin: neither the stage nor a round of its partition is in progress."""
        self._assignments = 0
        self._wake = asyncio.Event()
        self._stopping = False
        self._refresh_at_ms = services.clock_ms()
        """When the topics are to be read again."""
        self._policies_as_of_ms = 0
        """When (wall clock) the brokers were asked for the policies."""
        self._ownership_interval_ms = min(services.settings.topics_interval_ms, _OWNERSHIP_INTERVAL_MS)

    async def run(self) -> None:
        """Runs until `stop`. Returns when the steps in progress have ended, or were cancelled at their deadline."""
        try:
            await self._open_spool()
            async with asyncio.TaskGroup() as tasks:
                keepers = [tasks.create_task(keeper) for keeper in self._keepers()]
                while not self._stopping:
                    self._wake.clear()
                    self._start_rounds(tasks)
                    await self._wait(self._idle_ms())
                for keeper in keepers:
                    keeper.cancel()
                await self._end_work()
        finally:
            self._managed.clear()
            self._services.spool.close()

    async def _open_spool(self) -> None:
        """Opens the spool, however long its disk is full: the process is a member of the group already.

        If the manager gave up, the process would own partitions that nobody copies."""
        failing = self._lasting("the spool cannot be opened: nothing is copied", "the spool is open")
        while not self._stopping:
            self._wake.clear()
            try:
                await self._services.spool.open()
            except SpoolError as error:
                failing.found(error=str(error))
                await self._wait(self._services.settings.remote_log.task_retry_backoff_ms)
            else:
                failing.ended()
                return

    def stop(self) -> None:
        """Prevents new steps, and lets `run` end."""
        self._stopping = True
        self._wake.set()

    def settings_changed(self) -> None:
        """Follows the policies of the topics and the copy quota, which have just changed.

        Gives up the partitions that are not tiered any more, and cancels the work on them, before it returns. Reads the
        topics again soon, since only the brokers know those that are tiered from now on."""
        self._refresh_at_ms = now_ms = self._services.clock_ms()
        for _ in self._assign():
            pass
        for managed in self._managed.values():
            if managed.copy.throttled_ms:
                managed.stages["copy"].due_ms = now_ms
                self._reschedule(managed)
        self._wake.set()

    @property
    def partitions(self) -> list[TopicIdPartition]:
        """The partitions that this process copies now."""
        return list(self._managed)

    def report(self, partition: TopicIdPartition) -> PartitionReport | None:
        """Returns what the tasks of a partition know; None if this process does not own it."""
        tasks = self._managed.get(partition)
        return None if tasks is None else tasks.report()

    @property
    def backlog_bytes(self) -> int | None:
        """The bytes of all partitions that are not remote, as far as they are known. None: it manages none."""
        return sum(tasks.copy.uncopied.size_bytes for tasks in self._managed.values()) if self._managed else None

    def copies_waiting(self) -> Counter[Peer]:
        """Returns how many partitions are not copied because a store or the brokers do not answer."""
        peers = (managed.copy_waits_for for managed in self._managed.values())
        return Counter(peer for peer in peers if peer is not None)

    def alarms(self) -> list[ActiveAlarm]:
        """Returns the alarms of this process about partitions and topics that are raised now."""
        return list(self._services.metrics.alarms.active())

    def _keepers(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields the work beside the rounds, which goes on until it is cancelled."""
        services, settings = self._services, self._services.settings
        interval_ms, retention_ms = settings.topics_interval_ms, settings.remote_log.deleted_segment_retention_ms
        totals = TotalRetentionTask(services)
        yield self._keep_topics()
        yield self._keep_watch()
        yield self._keep(
            lambda: totals.run(self._topics.policies.values()),
            "the total retention of topics could not be recorded",
            "the total retention of topics can be recorded again",
            interval_ms,
        )
        if self._topic_deletion is not None:
            yield self._keep(
                self._topic_deletion.run,
                "deleted topics could not be found or removed",
                "deleted topics can be removed again",
                interval_ms,
            )
        yield self._keep(
            partial(delete_disabled, services, self._is_worked_on),
            "the remote log of a disabled topic could not be removed",
            "remote logs of disabled topics are removed again",
            interval_ms,
        )
        yield self._keep(
            self._store_kept,
            "a segment in the spool could not be stored for its owner",
            "segments in the spool can be stored for their owners again",
            interval_ms,
            delay_ms=interval_ms,
        )
        # A look at millions of deleted segments takes time, and none of them is urgent.
        rarely_ms = max(interval_ms, retention_ms // 100)
        yield self._keep(
            partial(forget_deleted_segments, services),
            "the objects of deleted segments could not be deleted once more",
            "the objects of deleted segments are deleted once more again",
            rarely_ms,
            delay_ms=rarely_ms,
        )

    async def _keep(
        self, work: Callable[[], Awaitable[object]], begins: str, ends: str, interval_ms: int, *, delay_ms: int = 0
    ) -> None:
        """Does the work once per interval. A failure is logged by `begins` and `ends`, and ends no other work."""
        failing = self._lasting(begins, ends)
        await asyncio.sleep(delay_ms / 1000)
        while True:
            try:
                await work()
                failing.ended()
            except Exception as error:
                is_known = isinstance(error, RemoteLogError)
                failing.found(error=str(error) if is_known else repr(error))
                if not is_known:
                    logger.exception("work of the remote log manager failed")
            await asyncio.sleep(interval_ms / 1000)

    def _lasting(self, begins: str, ends: str) -> LastingTrouble:
        return LastingTrouble(logger, begins, ends, clock_ms=self._services.clock_ms)

    async def _keep_topics(self) -> None:
        services, settings = self._services, self._services.settings
        unread = self._lasting("the tiered topics could not be read", "the tiered topics can be read again")
        while True:
            if services.clock_ms() >= self._refresh_at_ms:
                self._refresh_at_ms = services.clock_ms() + settings.topics_interval_ms
                asked_at_ms = services.wall_clock_ms()
                try:
                    await self._topics.refresh(settings.request_timeout_ms)
                    self._policies_as_of_ms = asked_at_ms
                    unread.ended()
                except RemoteLogError as error:
                    unread.found(error=str(error))
                except Exception:  # the copying of the known topics goes on
                    logger.exception("the tiered topics could not be read")
            for _ in self._assign():
                await asyncio.sleep(0)
            await asyncio.sleep(self._ownership_interval_ms / 1000)

    async def _store_kept(self) -> None:
        """Stores the segments in the spool whose partitions other members own by now. Raises the first error."""
        troubles: list[Exception] = []
        others = (each for each in self._services.spool.kept() if not self._is_worked_on(each.partition))
        await each_alone(others, partial(store_for_its_owner, self._services), troubles)
        if troubles:
            raise troubles[0]

    async def _keep_watch(self) -> None:
        while True:
            async for managed in in_turns(list(self._managed.values()), _PARTITIONS_OF_A_TURN):
                managed.watch_progress()
            await asyncio.sleep(min(_WATCH_INTERVAL_MS, self._services.settings.copy_stall_alarm_ms) / 1000)

    def _is_worked_on(self, partition: TopicIdPartition) -> bool:
        return partition in self._managed or partition in self._ending

    def _assign(self) -> Iterator[None]:
        """Takes on the partitions that are tiered and owned, and gives up the others.

        A partition that waits for its ownership is kept while its tenure lasts (docs/design.md, "Ownership"). Yields
        between turns of the loop. A later call ends the earlier one."""
        self._assignments += 1
        assignment, metadata, metrics = self._assignments, self._services.metadata, self._services.metrics
        tiered: set[TopicIdPartition] = set()
        policies = list(self._topics.policies.values())
        for partition, policy in ((one, each) for each in policies for one in each.partitions()):
            tiered.add(partition)
            known, tenure = self._managed.get(partition), metadata.log.tenure(partition)
            if known is not None and known.tenure == tenure:
                known.policy, known.policy_as_of_ms = policy, self._policies_as_of_ms
            else:
                self._give_up(partition)
                # Ownership may be lost and won again. Then the cancelled work ends first.
                if tenure is not None and partition not in self._ending:
                    taken_on = PartitionTasks(self._services, partition, policy, tenure)
                    taken_on.policy_as_of_ms = self._policies_as_of_ms
                    self._take_on(taken_on)
            if len(tiered) % _PARTITIONS_OF_A_TURN == 0:
                yield
                if assignment != self._assignments:
                    return
        for partition in self._managed.keys() - tiered:
            self._give_up(partition)
        self._services.failed_deletions.forget_unless(lambda partition: metadata.log.tenure(partition) is not None)
        metrics.failed_deletions.set(self._services.failed_deletions.count)
        metrics.owned_partitions.set(len(self._managed))
        metrics.keep_topics({each.topic for each in self._managed}, self._services.clock_ms())
        self._wake.set()

    def _take_on(self, managed: PartitionTasks) -> None:
        self._managed[managed.partition] = managed
        self._services.metrics.add(managed.partition)
        self._reschedule(managed)

    def _give_up(self, partition: TopicIdPartition) -> None:
        """Gives up a partition, and cancels the work on it. Later writes of that work are fenced.

        The next owner finishes the attempts."""
        managed = self._managed.pop(partition, None)
        if managed is None:
            return
        self._schedule.drop(managed)
        if managed.running:
            self._ending[partition] = managed
            for task in managed.running.values():
                if task is not asyncio.current_task():
                    task.cancel()
        self._services.metrics.forget(partition)
        self._services.metrics.owned_partitions.set(len(self._managed))

    def _reschedule(self, managed: PartitionTasks) -> None:
        """Puts the stages of a partition for which a round may begin into the schedule."""
        if self._managed.get(managed.partition) is managed and "survey" not in managed.running:
            for name in _STAGES_OF_A_ROUND:
                if name not in managed.running:
                    self._schedule.put(name, managed, managed.due_ms(name))
            if managed.is_urgent and "copy" not in managed.running:
                due_ms = managed.due_ms("copy")
                is_due = due_ms <= self._services.clock_ms()
                # Of those that are due, the one whose broker has the least time left comes first.
                self._schedule.put(_URGENT, managed, -int(1000 * managed.watch.retention_share) if is_due else due_ms)

    def _start_rounds(self, tasks: asyncio.TaskGroup) -> None:
        """Starts the rounds of the partitions with work that is due and has a place, those that wait longest first.

        While a partition waits for its ownership, no round begins, and the work in progress goes on."""
        now_ms = self._services.clock_ms()
        while self._has_place("survey"):
            open_stages = self._open_stages()
            found = self._schedule.first(open_stages)
            if found is None or found.at_ms > now_ms:
                return
            name, managed = found.kind, found.tasks
            due_ms = managed.due_ms("copy" if name == _URGENT else name)
            if due_ms > now_ms:
                self._schedule.put(name, managed, due_ms)
            elif not self._services.log.owns(managed.partition):
                self._schedule.put(name, managed, now_ms + self._ownership_interval_ms)
            else:
                idle = [each for each in open_stages if each in _WITH_PLACES and each not in managed.running]
                names = [each for each in idle if managed.due_ms(each) <= now_ms]
                for each in names:
                    self._places[each].add(managed)
                if name == _URGENT and "copy" not in names:
                    names.append("copy")
                    self._places[_URGENT].add(managed)
                self._schedule.drop(managed)
                self._launch(tasks, managed, "survey", self._round(tasks, managed, names))

    def _open_stages(self) -> list[str]:
        """Returns the stages that have a free place."""
        return ["expiry", *filter(self._has_place, (*_WITH_PLACES, _URGENT))]

    def _has_place(self, name: str) -> bool:
        return len(self._places[name]) < self._sizes[name]

    def _launch(
        self, tasks: asyncio.TaskGroup, managed: PartitionTasks, name: str, work: Coroutine[Any, Any, None]
    ) -> None:
        if managed not in self._places[_URGENT] or name != "copy":
            self._places[name].add(managed)
        task = managed.running[name] = tasks.create_task(self._guard(managed, name, work))
        # A task that is cancelled before it starts runs none of its code, so its place is freed by a callback.
        task.add_done_callback(lambda _: self._ended(managed, name, work))

    def _ended(self, managed: PartitionTasks, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Frees the place of work that has ended, and wakes `run`, which may give it to a partition that waits."""
        work.close()
        del managed.running[name]
        self._places[name].discard(managed)
        if name == "survey":
            for other in _WITH_PLACES:
                if other not in managed.running:
                    self._places[other].discard(managed)
        if not {"copy", "survey"} & managed.running.keys():
            self._places[_URGENT].discard(managed)
        if not managed.running and self._ending.get(managed.partition) is managed:
            del self._ending[managed.partition]
            self._services.metrics.forget(managed.partition)
        self._reschedule(managed)
        self._wake.set()

    async def _guard(self, managed: PartitionTasks, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Does the work of one partition. A divergence stops the partition.

        A lost ownership ends the work. If the tenure has ended, the partition is given up."""
        begin_in(managed.tenure)
        try:
            await work
        except OwnershipLostError:
            if self._services.log.tenure(managed.partition) != managed.tenure:
                self._give_up(managed.partition)
        except LogDivergedError as error:
            managed.stop(error, name)
        except Exception as error:  # what a stage does not catch must not affect the other partitions either
            managed.stages["survey"].failed(error)

    async def _round(self, tasks: asyncio.TaskGroup, managed: PartitionTasks, names: list[str]) -> None:
        surveyed = await managed.round()
        if surveyed is not None and not self._stopping and self._managed.get(managed.partition) is managed:
            work = {"copy": managed.run_copy, "trim": managed.run_trim, "deletion": managed.run_deletion}
            for name in names:
                self._launch(tasks, managed, name, work[name](surveyed))

    def _idle_ms(self) -> int:
        """Returns the time until a round can begin. Work that ends or an assignment ends the wait earlier."""
        interval_ms, has_place = self._services.settings.remote_log.task_interval_ms, self._has_place("survey")
        first = self._schedule.first(self._open_stages()) if has_place else None
        return interval_ms if first is None else max(1, min(first.at_ms - self._services.clock_ms(), interval_ms))

    async def _wait(self, timeout_ms: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self._wake.wait()

    async def _end_work(self) -> None:
        if tasks := self._running_tasks():
            await asyncio.wait(tasks, timeout=self._services.settings.stop_timeout_ms / 1000)
        for task in self._running_tasks():
            task.cancel()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        return [task for each in (*self._managed.values(), *self._ending.values()) for task in each.running.values()]
