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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.config import TidegateConfig
from tests.support.simulation.apis import SimApis
from tests.support.simulation.clients import SimClient
from tests.support.simulation.cluster import HOST, PORT, SimCluster
from tests.support.simulation.costs import Costs
from tests.support.simulation.environment import simulated_environment, unheard_garbage
from tests.support.simulation.expectation import Retention
from tests.support.simulation.faults import ALL_KINDS, LAST_S, Fault
from tests.support.simulation.groups import GroupCoordinator
from tests.support.simulation.loop import START_S, VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.oracle import Oracle, Violation
from tests.support.simulation.process import SimMachine
from tests.support.simulation.recovery import check_rebuild, recover
from tests.support.simulation.releases import several_releases
from tests.support.simulation.store import SimStore
from tests.support.simulation.transactions import TransactionCoordinator
from tests.support.simulation.workload import Producer
from tests.support.simulation.world import World

"""The name of its entry point would be looked for at each start of a process."""
VISIBLE_AFTER_MS = 3_000
RECOVERY_S = 120.0
"""Enough for a session that times out and two gaps, 30 s each: while an owner waits, brokers go on removing records."""
DELETED_SEGMENT_RETENTION_MS = 30_000
ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_RETENTIONS_MS = (-1, -1, -1, 14_000)
_RETENTIONS_BYTES = (-1, -1, 9_000)
_SLOW_UPLOAD_MS = 2_000


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
    planned: Sequence[Fault] = ()
    """All faults of the run, also after `faults` was shortened."""


class Simulation(World):
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
        self.store.on_served = self._served
        names = [f"proxy-{number}" for number in range(self._process_count())]
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
        self.costs = Costs(self)
        self.producers: list[Producer] = []
        self.clients: list[SimClient] = []
        self.faults_applied = 0
        self.cut_off_until_s = 0.0
        self.on_store_served: list[Callable[[str, str, str], None]] = []
        self._undo: list[Any] = []
        self._background: asyncio.TaskGroup | None = None
        self.events: list[str] = []

    def until_healed(self, end: Callable[[], None]) -> None:
        """Lets a fault last until all faults end."""
        self._undo.append(end)

    def _process_count(self) -> int:
        return self.rng.choice((2, 2, 3))

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
            "remote.log.metadata.topic.num.partitions": 2,
            "remote.log.index.file.cache.total.size.bytes": 0,
            "remote.log.chunk.file.cache.total.size.bytes": 0,
            "remote.log.chunk.cache.total.size.bytes": rng.choice((2_000, 1 << 20)),
            "remote.fetch.max.wait.ms": 2_000,
        }  # fmt: skip

    def _config(self, folder: Path) -> TidegateConfig:
        return TidegateConfig.model_validate({**self.settings, "state": {"path": folder}})

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
        if {fault.kind for fault in faults} == {"rebalance"}:
            # Uploads last so long that rebalances meet them.
            self.oracle.has_rebalances_only, self.store.slow_ms = True, _SLOW_UPLOAD_MS
            self.until_healed(lambda: setattr(self.store, "slow_ms", 0))
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
        self.oracle.calm_since_s = max(self.loop.time(), self.cut_off_until_s)
        if any(machine.release > 1 for machine in self.machines):
            for machine in self.machines:
                if machine.release == 1 or (machine.process is not None and machine.process.release == 1):
                    machine.release = 2
                    machine.crash()
                    self._undo.append(machine.start)
        for end in self._undo:
            end()
        self._undo.clear()

    def _served(self, verb: str, key: str, name: str) -> None:
        """Called when the store has served a request, before its answer leaves."""
        for serve in list(self.on_store_served):
            serve(verb, key, name)

    async def _tick(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1.0)
            seconds += 1
            self.costs.note_second()
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


def simulate(seed: int, faults: Sequence[Fault], *, is_quiet: bool = True, has_wire: bool = False) -> Outcome:
    """Runs a seed with these faults. With a wire, every request and answer is encoded and decoded."""
    root = Path(tempfile.mkdtemp(prefix="tidegate-simulation-", dir=ROOT))
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
    outcome, loop = Outcome(seed, faults, planned=faults), VirtualLoop()
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
        "gaps": sum(map(len, sim.oracle.truth.gaps.values())),
        "cuts": sim.oracle.truth.cuts,
        "runs that lost metadata": int(bool(sim.oracle.truth.lost_records)),
        "seconds without due copies": sim.costs.uncopied_s,
        "records in neither tier": sim.costs.records_in_no_tier(),
        **{f"store {what}": count for what, count in sim.store.counts.items()},
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
