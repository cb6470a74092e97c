"""`Simulation`: one run of a simulated cluster with several Tidegate processes, faults, clients and the oracle.

The run first meets the faults of its plan. Then all faults end, and within `RECOVERY_S` of virtual time everything must
be readable, copied, trimmed and expired again, unless an operator has to decide.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.config import TidegateConfig
from tests.support.simulation.apis import SimApis
from tests.support.simulation.clients import SimClient
from tests.support.simulation.cluster import HOST, PORT, SimCluster, SimPartition, SimTopic
from tests.support.simulation.compaction import compact
from tests.support.simulation.environment import WALL_START_MS, simulated_environment, unheard_garbage
from tests.support.simulation.expectation import Retention
from tests.support.simulation.faults import ALL_KINDS, LAST_S, Fault
from tests.support.simulation.groups import GroupCoordinator
from tests.support.simulation.loop import START_S, VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.oracle import Oracle, Violation
from tests.support.simulation.process import SimMachine
from tests.support.simulation.recovery import check_rebuild, recover
from tests.support.simulation.releases import several_releases, write_new_record
from tests.support.simulation.store import SimStore
from tests.support.simulation.transactions import TransactionCoordinator
from tests.support.simulation.workload import Producer
from tiers.model.ids import TopicIdPartition
from tiers.storage.object_key import parse_partition_manifest_key

_METADATA_MANAGER = "tiers.metadata.topic.topic_based:TopicBasedRemoteLogMetadataManager"
"""The name of its entry point would be looked for at each start of a process."""
METADATA_TOPIC = "__remote_log_metadata"
VISIBLE_AFTER_MS = 3_000
RECOVERY_S = 120.0
"""Enough for a session that times out and two gaps, 30 s each: while an owner waits, brokers go on removing records."""
DELETED_SEGMENT_RETENTION_MS = 30_000
MAX_CLOCK_SKEW_MS = 60_000
_ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_RETENTIONS_MS = (-1, -1, -1, 14_000)
_RETENTIONS_BYTES = (-1, -1, 9_000)


@dataclass
class Outcome:
    seed: int
    faults: Sequence[Fault]
    violation: str | None = None
    trace: str = ""
    """A hash over everything that happened."""
    virtual_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int, loop: VirtualLoop, root: Path, *, has_wire: bool = False) -> None:
        self.seed = seed
        self.loop = loop
        self.rng = random.Random(f"{seed}-world")
        self.network_rng = random.Random(f"{seed}-network")
        self.cluster = SimCluster(loop, self.network_rng, self.wall_ms)
        self.groups = GroupCoordinator(loop, self.network_rng)
        self.transactions = TransactionCoordinator(loop, self.network_rng, self.cluster)
        self.apis = SimApis(self.cluster, self.groups, self.transactions)
        self.network = Network(loop, self.network_rng, self.cluster, self.apis, has_wire=has_wire)
        self.store = SimStore(loop, self.network_rng)
        names = [f"proxy-{number}" for number in range(self.rng.choice((2, 2, 3)))]
        self.oracle = Oracle(
            loop, self.cluster, self.store, self.wall_ms, VISIBLE_AFTER_MS, lambda client: client in names
        )
        self.oracle.confirmed_s = lambda client: self.groups.confirmed_s.get(client, 0.0)
        self.apis.on_delete_records = self.oracle.trimming
        self.network.on_asking_to_trim = self.oracle.asking_to_trim
        self.settings = self._settings()
        self.machines = [
            SimMachine(name, root, loop, self.network_rng, self.network, self.store, self._config) for name in names
        ]
        self.oracle.on_metadata_cut = [machine.metadata_is_cut for machine in self.machines]
        self.retention = Retention(self.rng.choice(_RETENTIONS_MS), self.rng.choice(_RETENTIONS_BYTES))
        self.producers: list[Producer] = []
        self.clients: list[SimClient] = []
        self.faults_applied = 0
        self.cut_off_until_s = 0.0
        """Until when a machine is cut off for long."""
        self._undo: list[Any] = []
        self._background: asyncio.TaskGroup | None = None
        self.events: list[str] = []

    def wall_ms(self) -> int:
        return WALL_START_MS + self.loop.now_ms

    def _settings(self) -> dict[str, Any]:
        rng = self.rng
        topic = {
            "name": "orders",
            "segment.bytes": rng.choice((600, 1_000, 1_500)),
            "segment.ms": rng.choice((4_000, 8_000)),
            "local.retention.ms": rng.choice((-2, 0, 4_000)),
            "local.retention.bytes": rng.choice((0, 500, 1_500)),
        }
        return {
            "upstream": {
                "bootstrap.servers": [f"{HOST}{node}:{PORT}" for node in (1, 2, 3)],
                "request.timeout.ms": 8_000,
            },
            "storage": {"implementation": "tests.support.simulation.store:SimStorage"},
            "topics": [topic],
            "remote.log.manager.task.interval.ms": rng.choice((1_000, 2_000)),
            "remote.log.manager.task.retry.backoff.ms": 300,
            "remote.log.deleted.segment.retention.ms": DELETED_SEGMENT_RETENTION_MS,
            "remote.log.visible.after.ms": VISIBLE_AFTER_MS,
            "remote.log.metadata.manager.class.name": _METADATA_MANAGER,
            "remote.log.metadata.topic.num.partitions": 2,
            "remote.log.index.file.cache.total.size.bytes": 0,
            "remote.log.chunk.file.cache.total.size.bytes": 0,
            "remote.log.chunk.cache.total.size.bytes": rng.choice((2_000, 1 << 20)),
            "remote.fetch.max.wait.ms": 2_000,
        }  # fmt: skip

    def _config(self, folder: Path) -> TidegateConfig:
        return TidegateConfig.model_validate({**self.settings, "state": {"path": folder}})

    topic: SimTopic
    """The topic of the users."""

    async def run(self, faults: Sequence[Fault]) -> None:
        configs = {
            "cleanup.policy": "delete",
            "retention.ms": str(self.retention.ms),
            "retention.bytes": str(self.retention.size_bytes),
            "min.insync.replicas": "1",
        }
        topic = self.topic = self.cluster.create_topic("orders", 2, configs)
        for partition in topic.partitions:
            self.oracle.expect(partition, self.retention)
            self.producers.append(
                Producer(self.loop, random.Random(f"{self.seed}-{partition}"), self.cluster, self.apis, partition)
            )
        number = 0
        for machine in self.machines:
            machine.start()
            for partition in topic.partitions:
                number += 1
                client = SimClient(
                    self.loop, random.Random(f"{self.seed}-c{number}"), self.network, self.oracle, machine, partition,
                    number,
                )  # fmt: skip
                self.clients.append(client)
        self.oracle.has_rebalances_only = {fault.kind for fault in faults} == {"rebalance"}
        for fault in faults:
            self.loop.later(fault.at_s, self._begin, fault)
        async with asyncio.TaskGroup() as self._background:
            background = [self._background.create_task(one.run()) for one in self.producers]
            background += [self._background.create_task(one.run()) for one in self.clients]
            background.append(self._background.create_task(self._tick()))
            await asyncio.sleep(LAST_S + 2.0)
            self.heal()
            await recover(self, RECOVERY_S)
            for task in background:
                task.cancel()

    def _begin(self, fault: Fault) -> None:
        if self.oracle.violation is not None:
            return
        self.faults_applied += 1
        self.note(f"{fault}")
        end = ALL_KINDS[fault.kind][1](self, fault)
        if end is not None:
            self._undo.append(end)

            def undo() -> None:
                if end in self._undo:
                    self._undo.remove(end)
                    end()

            self.loop.later(fault.lasts_s, undo)

    def heal(self) -> None:
        """Ends all faults. An upgrade that began reaches every machine."""
        self.note("all faults end")
        if any(machine.release > 1 for machine in self.machines):
            for machine in self.machines:
                if machine.release == 1 or (machine.process is not None and machine.process.release == 1):
                    machine.release = 2
                    machine.crash()
                    self._undo.append(machine.start)
        for end in self._undo:
            end()
        self._undo.clear()

    def note(self, text: str) -> None:
        self.events.append(f"{self.loop.time() - START_S:8.3f} {text}")

    async def _tick(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1.0)
            seconds += 1
            self.groups.expire()
            if seconds % 5 == 0:
                for number in range(len(self._metadata_partitions())):
                    self.compact_metadata(number, 0.0)
                self.transactions.expire()
                self._apply_retention()
                await check_rebuild(self)
            if self.oracle.violation is not None:
                raise self.oracle.violation
            if self.loop.defect is not None:
                raise self.loop.defect

    def _apply_retention(self) -> None:
        """Every broker applies the topic's retention to its own replicas."""
        for partition, expected in self.oracle.expected.items():
            if self.loop.time() - expected.last_cut_s < 20:
                continue  # a leader cannot tell of records that it has removed: an owner must see the cut first
            configs = partition.topic.configs
            limit_ms, limit_bytes = int(configs["retention.ms"]), int(configs["retention.bytes"])
            for node, log in partition.replicas.items():
                broker = self.cluster.brokers[node]
                if not broker.is_up or broker.is_cut_off:
                    continue
                size, end = sum(len(one.data) for one in log.batches), log.start
                for batch in log.batches:
                    too_old = 0 <= limit_ms < self.wall_ms() - batch.timestamp_ms
                    too_much = 0 <= limit_bytes <= size - len(batch.data)
                    if not (too_old or too_much) or batch.next_offset > log.last_stable_offset:
                        break
                    size -= len(batch.data)
                    end = batch.next_offset
                if end > log.start:
                    if node == partition.leader:
                        self.oracle.broker_removes(partition, end)
                        self.cluster.trim(broker, partition, end)
                    else:
                        log.trim_to(end)

    # Faults that need more than a switch

    def may_lose_broker(self, node: int) -> bool:
        """Whether the two others run. So a majority of the replicas is always there, but for unclean elections."""
        return len([one for one in self.cluster.live_brokers() if one.node_id != node]) == 2

    def set_clock(self, machine: SimMachine, offset_ms: int) -> None:
        machine.wall_offset_ms = offset_ms
        if offset_ms <= MAX_CLOCK_SKEW_MS:  # with a larger skew, nothing may expire
            for expected in self.oracle.expected.values():
                expected.tolerance_ms = max(expected.tolerance_ms, offset_ms)

    def _knows_its_leaders(self) -> bool:
        return not any(broker.is_cut_off for broker in self.cluster.brokers.values())

    def _partition(self, which: int) -> SimPartition:
        partitions = list(self.oracle.expected)
        return partitions[which % len(partitions)]

    def has_all_manifests(self) -> bool:
        """Whether the store has the manifest of every partition, and no process has another folder in its place."""
        known = sum(parse_partition_manifest_key(key) is not None for key in self.store.objects)
        return not self.store.unmounted and known == len(self.oracle.expected)

    def cut_off_for_long(self, machine: SimMachine, lasts_s: float) -> None:
        links = {(machine.name, node) for node in self.cluster.brokers}
        self.network.cuts |= links
        self.cut_off_until_s = max(self.cut_off_until_s, self.loop.time() + lasts_s)
        self.loop.later(lasts_s, self.network.cuts.difference_update, links)

    def delete_records(self, which: int, size: float) -> None:
        """A user deletes records through a proxy, and repeats the request until it is answered."""
        partition = self._partition(which)
        client = next(
            one
            for one in self.clients
            if one.partition is partition and one.machine is self.machines[which % len(self.machines)]
        )
        expected = self.oracle.expected[partition]
        if self.loop.time() - expected.last_cut_s < 20 or partition.leader < 0:
            return
        offset = int(expected.end * min(1.0, size * 1.2))
        asked_in = expected.histories

        async def delete() -> None:
            expected.deleted_to = max(expected.deleted_to, offset)
            expected.deletions_open += 1
            for _ in range(20):
                if expected.histories != asked_in:
                    return
                leader_epoch, is_certain = partition.leader_epoch, self._knows_its_leaders()
                code = await client.delete_records(offset)
                self.note(f"DeleteRecords to {offset} of {partition}: {code}")
                is_certain &= partition.leader_epoch == leader_epoch and self._knows_its_leaders()
                if code != 0 or not is_certain:
                    expected.deleted_without_epoch_to = max(expected.deleted_without_epoch_to, offset)
                if code == 0:
                    expected.confirmed_deletions.append((self.loop.time(), offset))
                    expected.deletions_open -= 1
                    return
                await asyncio.sleep(1.0)

        assert self._background is not None
        self._background.create_task(delete())

    def damage_batch(self, which: int) -> None:
        """Damages the next batch to copy, for good. What is copied must be trimmed and must expire all the same."""
        partition = self._partition(which)
        finished = self.oracle.truth.finished((partition.topic.topic_id, partition.index))
        remote_end = max((one.metadata.end_offset + 1 for one in finished), default=-1)
        if partition.unreadable_at < 0 <= remote_end and partition.log.start <= remote_end < partition.log.end:
            partition.unreadable_at = remote_end

    def broker_removes(self, which: int, size: float) -> None:
        """An administrator deletes records at the broker, behind the proxies' back."""
        partition = self._partition(which)
        expected = self.oracle.expected[partition]
        if partition.leader < 0 or self.loop.time() - expected.last_cut_s < 20:
            return
        ends = [one.next_offset for one in partition.log.batches if one.next_offset <= partition.log.last_stable_offset]
        if ends and not self.cluster.brokers[partition.leader].is_cut_off:
            end = ends[int((len(ends) - 1) * size)]
            self.oracle.broker_removes(partition, end)
            self.cluster.trim(self.cluster.brokers[partition.leader], partition, end)

    def _replica_to_elect(self, partition: SimPartition) -> int | None:
        live = [one.node_id for one in self.cluster.live_brokers() if one.node_id != partition.leader]
        return live[0] if live and partition.leader >= 0 else None

    def unclean_election(self, which: int, size: float, *, is_out_of_date: bool = False) -> None:
        """A replica that lacks the last batches becomes the leader.

        One that is out of date has records that were trimmed since."""
        partition = self._partition(which)
        node = self._replica_to_elect(partition)
        if node is None:
            return
        log = partition.replicas[node]
        if is_out_of_date:
            self.oracle.expected[partition].may_reappear = True
            log.bring_back(12)
        ends = [one.next_offset for one in log.batches[-8:] if not _open_at(log.batches, one.next_offset)]
        ends = [end for end in ends if end > log.start]
        if ends:
            log.truncate_to(ends[int((len(ends) - 1) * size)])
            self.cluster.elect(partition, unclean=node)

    def emptied_election(self, which: int) -> None:
        """A replica whose disk was replaced becomes the leader."""
        partition = self._partition(which)
        node = self._replica_to_elect(partition)
        if node is not None:
            partition.replicas[node].reset_to(0)
            self.oracle.expected[partition].has_other_history = True
            self.cluster.elect(partition, unclean=node)

    def log_start_goes_back(self, which: int) -> None:
        """After an unclean stop, a broker has some trimmed records again."""
        partition = self._partition(which)
        if partition.leader < 0:
            return
        self.oracle.expected[partition].may_reappear = True
        for log in partition.replicas.values():
            log.bring_back(6)
        self.cluster.elect(partition)

    def _metadata_partition(self, which: int) -> SimPartition | None:
        partitions = self._metadata_partitions()
        return partitions[which % len(partitions)] if partitions else None

    def _metadata_partitions(self) -> Sequence[SimPartition]:
        topic = self.cluster.topics.get(METADATA_TOPIC)
        return () if topic is None else topic.partitions

    def metadata_leader(self, which: int) -> int:
        partition = self._metadata_partition(which)
        return 1 if partition is None else partition.last_leader

    def metadata_loses_tail(self, which: int, size: float) -> None:
        partition = self._metadata_partition(which)
        node = None if partition is None else self._replica_to_elect(partition)
        if partition is None or node is None:
            return
        log = partition.replicas[node]
        ends = [one.next_offset for one in log.batches[-30:] if not _open_at(log.batches, one.next_offset)]
        if ends:
            log.truncate_to(ends[int((len(ends) - 1) * size)])
            self.cluster.elect(partition, unclean=node)

    def metadata_loses_head(self, which: int, size: float) -> None:
        partition = self._metadata_partition(which)
        if partition is None or partition.leader < 0 or not partition.log.batches:
            return
        self.oracle.truth.lost_records.add(partition.index)
        end = partition.log.batches[int((len(partition.log.batches) - 1) * size * 0.5)].next_offset
        for log in partition.replicas.values():
            log.trim_to(min(end, log.end))

    def compact_metadata(self, which: int, size: float) -> None:
        """The brokers' log cleaners run. They leave the last batches, which are in the active segment."""
        partition = self._metadata_partition(which)
        if partition is None:
            return
        for node, log in partition.replicas.items():
            if not self.cluster.brokers[node].is_up:
                continue
            active = log.batches[-1 - int(size * 12) :]
            end = min([log.last_stable_offset, *(one.base_offset for one in active)])
            compact(log, end, self.wall_ms(), int(partition.topic.configs["delete.retention.ms"]))

    def upgrade(self, pause_s: float) -> None:
        """Restarts one machine after the other with a later release, whose owners write a new type of record."""

        async def roll() -> None:
            for machine in self.machines:
                machine.release = 2
                machine.stop()
                await asyncio.sleep(0.5)
                machine.start()
                await self._write_new_records()
                await asyncio.sleep(pause_s)
            for _ in range(5):
                await asyncio.sleep(2.0)
                await self._write_new_records()

        assert self._background is not None
        self._background.create_task(roll())

    async def _write_new_records(self) -> None:
        for machine in self.machines:
            process = machine.process
            if process is not None and process.release >= 2 and process.metadata is not None:
                for partition in self.oracle.expected:
                    place = TopicIdPartition(partition.topic.topic_id, partition.index, partition.topic.name)
                    writing = process.spawn(write_new_record(process.metadata, place))
                    await asyncio.wait({writing}, timeout=10.0)
                    if writing.done() and writing.result():
                        self.note(f"{machine.name} wrote a record of a later release")

    def change_retention(self, size: float) -> None:
        retention = Retention((-1, 10_000, 16_000)[int(size * 2.999)], -1)
        self.topic.configs["retention.ms"], self.topic.configs["retention.bytes"] = map(str, retention)
        for expected in self.oracle.expected.values():
            expected.retentions.append(retention)


def _open_at(batches: Sequence[Any], end: int) -> bool:
    """Whether a transaction is open at the offset."""
    still_open: set[int] = set()
    for batch in batches:
        if batch.next_offset > end:
            break
        if batch.ends:
            still_open.discard(batch.producer_id)
        elif batch.producer_id >= 0:
            still_open.add(batch.producer_id)
    return bool(still_open)


def simulate(seed: int, faults: Sequence[Fault], *, is_quiet: bool = True, has_wire: bool = False) -> Outcome:
    """Runs a seed with these faults. With a wire, every request and answer is encoded and decoded."""
    root = Path(tempfile.mkdtemp(prefix="tidegate-simulation-", dir=_ROOT))
    level = logging.root.manager.disable
    if is_quiet:
        logging.disable(logging.CRITICAL)
    try:
        with unheard_garbage():
            return _simulate(seed, faults, root, has_wire)
    finally:
        logging.disable(level)
        shutil.rmtree(root, ignore_errors=True)


def _simulate(seed: int, faults: Sequence[Fault], root: Path, has_wire: bool) -> Outcome:
    outcome, loop = Outcome(seed, faults), VirtualLoop()
    with simulated_environment(loop, seed, has_wire=has_wire), several_releases():
        sim = Simulation(seed, loop, root, has_wire=has_wire)
        try:
            loop.run_virtual(sim.run(faults))
        except Exception as error:
            outcome.violation = _told(error)
        if sim.oracle.violation is not None:
            outcome.violation = str(sim.oracle.violation)
        for machine in sim.machines:
            machine.crash()
    outcome.events = sim.events
    outcome.virtual_s = loop.time() - START_S
    outcome.counts = {
        "callbacks": loop.callbacks_run,
        "requests": sim.network.requests,
        "store requests": sim.store.requests,
        "faults": sim.faults_applied,
        "reads": sim.oracle.reads,
        "remote reads": sim.oracle.remote_reads,
        "trims": sim.oracle.trims,
        "deletions": sim.oracle.deletions,
        "segments": len(sim.oracle.truth.segments),
        "gaps": sim.oracle.truth.gaps,
        "clamps": sim.oracle.truth.clamps,
    }
    # The key of a probe follows from the folder of its process, which is another one in each run.
    objects = sorted(key for key in sim.store.objects if not key.startswith(".check-"))
    state = (outcome.virtual_s, sim.events, objects, outcome.counts)
    outcome.trace = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    loop.close()
    return outcome


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, Violation) else "".join(traceback.format_exception(error))
