"""`Story`: a scripted run of a simulated cluster, for losses that were once proved.

A story names only what a user can see: records, answers of Fetch and ListOffsets, objects in the store, and alarms. So
it holds for any design of the tier. The stories themselves are in the modules `stories_of_*`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import build_batch, record
from tests.support.simulation.clients import SimClient
from tests.support.simulation.cluster import SimPartition, SimTopic
from tests.support.simulation.environment import simulated_environment, unheard_garbage
from tests.support.simulation.expectation import Retention
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.oracle import UNAVAILABLE, Violation
from tests.support.simulation.process import SimMachine
from tests.support.simulation.releases import several_releases
from tests.support.simulation.simulation import ROOT, Simulation
from tests.support.simulation.workload import Produced
from tiers.storage.object_key import SegmentObjectKey, parse_segment_key

MINUTE_S = 60.0
HOUR_S = 3_600.0
_EARLIEST = -2
_VALUE_BYTES = 50
_ANSWERED_WITHIN_S = 60.0
"""How long a consumer may get errors that it retries, or no records, where the log has records."""


_ONE_DAY, _UNLIMITED = Retention(86_400_000, -1), Retention(-1, -1)


class StoryError(Exception):
    """The story goes another way than it must."""


@dataclass(frozen=True)
class Script:
    name: str
    says: str
    body: Callable[[Story], Coroutine[Any, Any, None]]
    processes: int = 1
    is_encrypted: bool = False
    broker_retention: Retention = _ONE_DAY
    total: Retention | None = _UNLIMITED
    """The total of its own that the topic has; None: the broker's retention is the total."""
    topic: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def story(**options: Any) -> Callable[[Callable[[Story], Coroutine[Any, Any, None]]], Script]:
    """Makes a story of a function, whose name and first line of documentation name the story."""

    def take(body: Callable[[Story], Coroutine[Any, Any, None]]) -> Script:
        says = (body.__doc__ or "").strip().splitlines()[0]
        return Script(body.__name__.replace("_", "-"), says, body, **options)

    return take


class Segment(NamedTuple):
    """A segment of which the store had both objects at a time."""

    first: int
    next_offset: int
    keys: frozenset[str]


class Story(Simulation):
    def __init__(self, script: Script, loop: VirtualLoop, root: Path) -> None:
        self.script = script
        super().__init__(1, loop, root)
        if script.is_encrypted:
            key = root / "key"
            key.write_bytes(bytes(range(32)))
            self.settings["encryption"] = {"current": "k1", "keys": {"k1": key}}
        self._lost: set[str] = set()
        """The keys of segments' objects that were deleted while no other whole segment had the records."""
        self._waiting: list[tuple[Callable[[str, str], Any], asyncio.Future[Any]]] = []
        self._connections = 0

    partition: SimPartition

    def _process_count(self) -> int:
        return self.script.processes

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        topic = {"name": "orders", "segment.bytes": 1_000, "segment.ms": 600_000, "local.retention.ms": -2}
        if self.script.total is not None:
            topic["remote.log.retention.minutes"] = self.script.total.ms
            topic["remote.log.retention.bytes"] = self.script.total.size_bytes
        more = {"topics": [{**topic, **self.script.topic}], "remote.log.manager.task.interval.ms": 2_000}
        return {**settings, **more, **self.script.settings}

    # The run

    async def tell(self) -> None:
        retention = self.script.broker_retention
        configs = {
            "cleanup.policy": "delete",
            "retention.ms": str(retention.ms),
            "retention.bytes": str(retention.size_bytes),
            "min.insync.replicas": "1",
        }
        self.topic = self.cluster.create_topic("orders", 1, configs)
        (self.partition,) = self.topic.partitions
        self.oracle.expect(self.partition, self.script.total or retention)
        async with asyncio.TaskGroup() as self._background:
            ticking = self._background.create_task(self._tick())
            await self.start()
            await self.script.body(self)
            if self.oracle.violation is not None:
                raise self.oracle.violation
            ticking.cancel()

    async def _tick(self) -> None:
        """Nothing expires while no process runs, so that two days take no longer than an hour."""
        seconds = 0
        while True:
            is_running = any(machine.process is not None for machine in self.machines)
            await asyncio.sleep(1.0 if is_running else MINUTE_S)
            seconds += 1
            self.groups.expire()
            self.transactions.expire()
            if seconds % 5 == 0:
                self._apply_retention()
            for failed in (self.oracle.violation, self.loop.defect):
                if failed is not None:
                    raise failed

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, what: str, is_so: Callable[[], bool], within_s: float = 120.0) -> None:
        deadline_s = self.loop.time() + within_s
        while not is_so():
            if self.loop.time() >= deadline_s:
                raise StoryError(f"after {within_s:.0f} s: {what}. Alarms: {sorted(self.alarms())}")
            await asyncio.sleep(0.1)

    # Processes

    @property
    def machine(self) -> SimMachine:
        return self.machines[0]

    async def start(self, *, keep_state: bool = True) -> None:
        """Starts all processes that do not run, and waits until they serve."""
        for machine in self.machines:
            machine.start(keep_state=keep_state)
        await self.until("not all processes serve", self._all_serve)

    def _all_serve(self) -> bool:
        return all(one.process is not None and one.process.handlers for one in self.machines)

    def kill(self) -> None:
        """Ends all processes at once."""
        for machine in self.machines:
            machine.crash()

    async def roll(self) -> None:
        """Restarts one process after the other, cleanly."""
        for machine in self.machines:
            machine.stop()
            await self.until("a process does not stop", lambda machine=machine: machine.process is None)  # type: ignore[misc]
            machine.start()
            await self.until("a process does not start", self._all_serve)

    def alarms(self) -> set[str]:
        """Returns the reasons of the alarms that are raised now."""
        return self._reasons("tidegate_remote_log_alarm")

    def alarms_so_far(self) -> set[str]:
        """Returns the reasons of the alarms that the processes of now have raised at any time."""
        return self._reasons("tidegate_remote_log_alarms_total")

    def _reasons(self, name: str) -> set[str]:
        return {
            sample.labels["reason"]
            for machine in self.machines
            if machine.process is not None
            for metric in machine.process.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value > 0
        }

    def kept(self, machine: SimMachine) -> list[tuple[int, int]]:
        """Returns the offsets (the second one exclusive) of the segments in the spool of a machine."""
        folders = [machine.process.folder] if machine.process is not None else []
        names = [log.stem.split("-") for folder in folders for log in (folder / "spool").glob("*.log")]
        return sorted((int(name[-8]), int(name[-7]) + 1) for name in names)

    # Brokers

    @property
    def end(self) -> int:
        return self.partition.log.end

    @property
    def size_bytes(self) -> int:
        """The bytes of all records that were produced."""
        return sum(len(one.data) for one in self.oracle.expected[self.partition].batches)

    async def produce(self, count: int, value_bytes: int = _VALUE_BYTES, age_ms: int = 0) -> None:
        """Produces records, each in a batch of its own, with acks=all. Their timestamps lie `age_ms` in the past."""
        for _ in range(count):
            value = b"%d-" % self.end
            made = build_batch(0, [record(0, self.wall_ms() - age_ms, value=value.ljust(value_bytes, b"x"))])
            broker = self.cluster.brokers[self.partition.leader]
            answer = self.apis.produce(broker, self.partition, made, Produced)
            answer = answer if isinstance(answer, Produced) else await answer
            assert answer.error_code == ErrorCode.NONE, answer
            await asyncio.sleep(0.01)

    def retention_removes(self, below: int) -> None:
        """The broker's own retention removes records."""
        self.oracle.broker_removes(self.partition, below)
        self.cluster.trim(self.cluster.brokers[self.partition.leader], self.partition, below)

    def cut_off_leader(self, common_end: int) -> None:
        """Cuts the leader off from the controllers, and elects a replica that has only the records below `common_end`.

        Proxies and clients still reach both brokers."""
        former = self.partition.leader
        self.groups.split(former)
        self.cluster.cut_off(former)
        follower = next(node for node in self.cluster.brokers if node != former)
        self.partition.replicas[follower].truncate_to(common_end)
        self.cluster.elect(self.partition, unclean=follower)

    def rejoin(self, node: int) -> None:
        """Ends what `cut_off_leader` did to a broker."""
        self.groups.heal(node)
        self.cluster.rejoin(node)

    async def user_deletes(self, below: int) -> None:
        """A user deletes records through a proxy."""
        self.oracle.expected[self.partition].deleted_to = below
        code = await self.consumer(self.machine).delete_records(below)
        assert code == ErrorCode.NONE, code

    async def user_deletes_topic(self, and_then: Callable[[], None] = lambda: None) -> int | None:
        """A user deletes the topic through a proxy. `and_then` is called before the proxy has the brokers' answer.

        Returns the error code of the answer; None: the user gets none."""

        def deleted(topic: SimTopic) -> None:
            del self.oracle.expected[self.partition]
            and_then()

        self.cluster.on_topic_deleted = deleted
        return await self.consumer(self.machine).delete_topic()

    # The store

    def _served(self, verb: str, key: str, name: str) -> None:
        parsed = parse_segment_key(key)
        if verb == "DELETE" and parsed is not None and self._whole_to(parsed.base_offset) <= parsed.end_offset:
            self._lost.add(key)
        for one in list(self._waiting):
            matches, future = one
            found = matches(verb, key)
            if found is not None and not future.done():
                self._waiting.remove(one)
                future.set_result(found)

    async def served(self, matches: Callable[[str, str], Any], within_s: float = 120.0) -> Any:
        """Returns what `matches` makes of the first request that it does not answer None, in the moment in which the
        store has served it. Nobody has its answer then."""
        future: asyncio.Future[Any] = self.loop.create_future()
        self._waiting.append((matches, future))
        done, _ = await asyncio.wait({future}, timeout=within_s)
        if not done:
            raise StoryError(f"the store was not asked within {within_s:.0f} s. Alarms: {sorted(self.alarms())}")
        return future.result()

    async def next_segment(self) -> Segment:
        """Produces two segments. Returns the next one in the moment in which the store has both of its objects."""
        self.begin(self.produce(16))

        def matches(verb: str, key: str) -> Segment | None:
            return next((one for one in self.whole_segments() if verb == "PUT" and key in one.keys), None)

        found: Segment = await self.served(matches)
        return found

    def whole_segments(self) -> list[Segment]:
        """Returns the segments of which the store has both objects now."""
        keys: dict[SegmentObjectKey, set[str]] = {}
        for key in self.store.objects:
            parsed = parse_segment_key(key)
            if parsed is not None:
                keys.setdefault(replace(parsed, suffix=""), set()).add(key)
        found = [Segment(of.base_offset, of.end_offset + 1, frozenset(each)) for of, each in keys.items()]
        return sorted(one for one in found if len(one.keys) == 2)

    @property
    def copied_end(self) -> int:
        """The end of the last segment of which the store has both objects."""
        return max((one.next_offset for one in self.whole_segments()), default=0)

    async def copied_to(self, offset: int, within_s: float = 120.0) -> None:
        """Waits until the store has segments without a hole up to `offset`, and a little longer."""

        deadline_s = self.loop.time() + within_s
        while self._whole_to(self._first) < offset:
            if self.loop.time() >= deadline_s:
                has = f"{self._first} to {self._whole_to(self._first) - 1} of {offset}"
                raise StoryError(f"the store has only {has}. Alarms: {sorted(self.alarms_so_far())}")
            await asyncio.sleep(0.1)
        await self.passes(10.0)

    @property
    def _first(self) -> int:
        return min((one.first for one in self.whole_segments()), default=0)

    def _whole_to(self, offset: int) -> int:
        """Returns the end of the whole segments that have all records from the offset on."""
        for one in self.whole_segments():
            if one.first <= offset:
                offset = max(offset, one.next_offset)
        return offset

    def require_kept(self, segment: Segment) -> None:
        """Fails if an object of the segment was deleted before another whole segment had its records."""
        if segment.keys & self._lost:
            raise StoryError(f"the objects of {segment.first} to {segment.next_offset - 1} were deleted")

    def refuse(self, is_refused: Callable[[str, str], bool]) -> None:
        """Lets the store answer 503 to some requests, by verb and key."""
        self.store.refusals = [is_refused]

    def accept_all(self) -> None:
        self.store.refusals = []

    # Consumers

    def consumer(self, machine: SimMachine) -> SimClient:
        self._connections += 1
        rng = random.Random(f"consumer-{self._connections}")
        return SimClient(self.loop, rng, self.network, self.oracle, machine, self.partition, self._connections)

    async def require_readable(self, first: int = 0) -> None:
        """Reads all records from `first` on through every process, and compares them with what was produced."""
        for machine in self.machines:
            client, position, since_s = self.consumer(machine), first, self.loop.time()
            while position < self.end:
                answer = await client.fetch(position, 4_000)
                code = -1 if answer is None else answer.error_code
                if answer is not None and code == ErrorCode.NONE and len(answer.records):
                    position, since_s = self._check(position, bytes(answer.records)), self.loop.time()
                    continue
                if code == ErrorCode.OFFSET_OUT_OF_RANGE or self.loop.time() - since_s > _ANSWERED_WITHIN_S:
                    said = "no records" if code == ErrorCode.NONE else f"error {code}"
                    raise StoryError(
                        f"a Fetch at {position} of {first} to {self.end - 1} gets {said}. Alarms:"
                        f" {sorted(self.alarms_so_far())}"
                    )
                assert code in (-1, ErrorCode.NONE, *UNAVAILABLE), code
                await asyncio.sleep(0.5)

    def _check(self, position: int, records: bytes) -> int:
        ever = self.oracle.expected[self.partition].ever
        for batch in iterate_batches(records):
            if batch.is_control or batch.base_offset > position:
                until = batch.last_offset if batch.is_control else batch.base_offset - 1
                raise StoryError(f"a consumer skips {position} to {until}. Alarms: {sorted(self.alarms_so_far())}")
            if records[batch.start : batch.end] not in ever.get(batch.base_offset, ()):
                raise StoryError(f"offset {batch.base_offset} has other bytes than were produced")
            position = batch.last_offset + 1
        return position

    async def fetch_code(self, offset: int, machine: SimMachine | None = None) -> int:
        """Returns the error code of a Fetch; -1 without an answer."""
        answer = await self.consumer(machine or self.machine).fetch(offset, 4_000)
        return -1 if answer is None else answer.error_code

    async def earliest(self) -> int | None:
        """Returns the answer to EARLIEST; None: an error, or no answer."""
        answer = await self.consumer(self.machine).list_offsets(_EARLIEST)
        return None if answer is None or answer[0] else answer[1]

    def watch(self, offset: int) -> Watch:
        """Begins to fetch at `offset` again and again."""
        watch = Watch(self, offset)
        watch.task = self.begin(watch.run())
        return watch


class Watch:
    """Fetches at one offset until it is ended, and keeps the error codes of the answers."""

    task: asyncio.Task[None]

    def __init__(self, of: Story, offset: int) -> None:
        self._of = of
        self._offset = offset
        self.codes: dict[int, int] = {}
        """How often each error code came."""

    async def run(self) -> None:
        while True:
            code = await self._of.fetch_code(self._offset)
            self.codes[code] = self.codes.get(code, 0) + 1
            await asyncio.sleep(0.2)

    def require_no_reset(self) -> None:
        """Ends, and fails if an answer was OFFSET_OUT_OF_RANGE."""
        self.task.cancel()
        refused = self.codes.get(ErrorCode.OFFSET_OUT_OF_RANGE, 0)
        if refused:
            answers = sum(count for code, count in self.codes.items() if code >= 0)
            raise StoryError(f"{refused} of {answers} Fetches at {self._offset} were answered OFFSET_OUT_OF_RANGE")


class Told(NamedTuple):
    script: Script
    failure: str | None
    """How the story went another way; None: it did not."""
    events: list[str]


def tell(script: Script, *, is_quiet: bool = True) -> Told:
    """Runs a story."""
    root = Path(tempfile.mkdtemp(prefix="tidegate-story-", dir=ROOT))
    level = logging.root.manager.disable
    if is_quiet:
        logging.disable(logging.CRITICAL)
    try:
        with unheard_garbage():
            return _tell(script, root)
    finally:
        logging.disable(level)
        shutil.rmtree(root, ignore_errors=True)


def _tell(script: Script, root: Path) -> Told:
    loop, failure = VirtualLoop(), None
    with simulated_environment(loop, 1), several_releases():
        made = Story(script, loop, root)
        try:
            loop.run_virtual(made.tell())
        except Exception as error:
            failure = _failure(error)
        for machine in made.machines:
            machine.crash()
    loop.close()
    return Told(script, failure, made.events)


def _failure(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, (StoryError, Violation)):
        return str(error)
    return "".join(traceback.format_exception(error))
