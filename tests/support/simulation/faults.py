"""The faults of a simulated run: a plan that follows from the seed, as a list that can be shortened.

A fault is a kind, a time, and three numbers that the kind interprets. So a run without one of the faults leaves the
others as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tests.support.simulation.doubts import KINDS_OF_DOUBT
from tests.support.simulation.store import refuse
from tiers.config.topic_policy import SAME_AS_TOTAL, TopicConfig

if TYPE_CHECKING:
    from tests.support.simulation.process import SimMachine
    from tests.support.simulation.simulation import Simulation

FIRST_S, LAST_S = 4.0, 20.0
"""When faults begin, counted from the start of the run."""


class Fault(NamedTuple):
    at_s: float
    kind: str
    which: int
    size: float
    """From 0 to 1."""
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  {self.kind}  which={self.which} size={self.size:.3f} for {self.lasts_s:.3f} s"


Apply = Callable[["Simulation", Fault], Callable[[], None] | None]
"""Begins a fault. Returns how it ends, or None if it ends by itself."""


def _machine(sim: Simulation, fault: Fault) -> SimMachine:
    return sim.machines[fault.which % len(sim.machines)]


def _node(fault: Fault) -> int:
    return 1 + fault.which % 3


def _crash(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    machine.crash()
    return lambda: machine.start(keep_state=fault.size < 0.6)


def _power_cut(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    machine.crash()
    machine.damage_state(fault.size)
    return machine.start


def _old_copy(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """Copies the state of a machine now. At the end, the machine crashes and goes on with the copy."""
    machine = _machine(sim, fault)
    copied = machine.copy_state()

    def end() -> None:
        if machine.process is not None and copied is not None:
            machine.crash()
            machine.restore_state(copied)
            machine.start()

    return end


def _restart(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    machine.stop()
    return lambda: machine.start()


def _pause(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    machine.pause()
    return machine.go_on


def _clock(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    far = 3_600_000 if fault.size < 0.5 else 40_000
    offset_ms = int((fault.size * 10 % 1 - 0.5) * 2 * far)
    sim.set_clock(machine, offset_ms)
    return lambda: sim.set_clock(machine, 0)


def _disk(sim: Simulation, fault: Fault) -> Callable[[], None]:
    machine = _machine(sim, fault)
    machine.is_disk_full = True

    def end() -> None:
        machine.is_disk_full = False

    return end


def _disk_for_good(sim: Simulation, fault: Fault) -> None:
    """The disk of one machine stays full, also after all other faults have ended."""
    if all(one.full_since_s is None for one in sim.machines):
        _machine(sim, fault).full_since_s = sim.loop.time()


def _rebalance(sim: Simulation, fault: Fault) -> None:
    sim.groups.rebalance()


def _broker_stop(sim: Simulation, fault: Fault) -> Callable[[], None] | None:
    node = _node(fault)
    if not sim.may_lose_broker(node):
        return None
    sim.cluster.stop(node)
    return lambda: sim.cluster.start(node)


def _broker_cut_off(sim: Simulation, fault: Fault) -> Callable[[], None] | None:
    node = _node(fault)
    if not sim.may_lose_broker(node):
        return None
    sim.groups.split(node)
    sim.cluster.cut_off(node)

    def end() -> None:
        sim.groups.heal(node)
        sim.cluster.rejoin(node)

    return end


def _broker_slow(sim: Simulation, fault: Fault) -> Callable[[], None]:
    broker = sim.cluster.brokers[_node(fault)]
    broker.slow_ms = int(fault.size * 6_000)

    def end() -> None:
        broker.slow_ms = 0

    return end


def _elect(sim: Simulation, fault: Fault) -> None:
    partitions = list(sim.cluster.partitions())
    sim.cluster.elect(partitions[fault.which % len(partitions)])


def _link_cut(sim: Simulation, fault: Fault) -> Callable[[], None]:
    link = _machine(sim, fault).name, 1 + int(fault.size * 2.999)
    sim.network.cuts.add(link)
    return lambda: sim.network.cuts.discard(link)


def _metadata_cut(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """Cuts a process off from the leader of a metadata partition. It may reach the leaders of other partitions."""
    node = sim.metadata_leader(int(fault.size * 10))
    link = _machine(sim, fault).name, node
    sim.network.cuts.add(link)
    return lambda: sim.network.cuts.discard(link)


def _isolate(sim: Simulation, fault: Fault) -> Callable[[], None]:
    links = {(_machine(sim, fault).name, node) for node in (1, 2, 3)}
    sim.network.cuts |= links
    return lambda: sim.network.cuts.difference_update(links)


def _cut_off_for_long(sim: Simulation, fault: Fault) -> None:
    """A machine reaches no broker for longer than the metadata topic keeps tombstones, while the others go on."""
    sim.cut_off_for_long(_machine(sim, fault), 60.0 + 20.0 * fault.size)


def _slow_link(sim: Simulation, fault: Fault) -> Callable[[], None]:
    name = _machine(sim, fault).name
    sim.network.slow_ms[name] = int(fault.size * 5_000)
    return lambda: _forget(sim.network.slow_ms, name)


def _lost_answers(sim: Simulation, fault: Fault) -> Callable[[], None]:
    name = _machine(sim, fault).name
    sim.network.lost_answers[name] = 0.02 + fault.size * 0.4
    return lambda: _forget(sim.network.lost_answers, name)


def _forget(values: dict[str, int] | dict[str, float], name: str) -> None:
    values.pop(name, None)


def _store_down(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.is_down = True

    def end() -> None:
        sim.store.is_down = False

    return end


def _store_errors(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.error_rate = 0.1 + 0.6 * fault.size

    def end() -> None:
        sim.store.error_rate = 0.0

    return end


def _store_lost(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.lost_rate = 0.05 + 0.5 * fault.size

    def end() -> None:
        sim.store.lost_rate = 0.0

    return end


def _store_truncates(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.truncate_rate = 0.2 + 0.6 * fault.size

    def end() -> None:
        sim.store.truncate_rate = 0.0

    return end


def _store_slow(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.slow_ms = int(fault.size * 9_000)

    def end() -> None:
        sim.store.slow_ms = 0

    return end


def _store_late(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.late_ms = int(fault.size * 14_000)

    def end() -> None:
        sim.store.late_ms = 0

    return end


def _store_refuses(sim: Simulation, fault: Fault) -> Callable[[], None]:
    return refuse(sim.store, ("PUT", "DELETE"))


def _store_late_puts(sim: Simulation, fault: Fault) -> Callable[[], None]:
    sim.store.late_put_rate = 0.2 + 0.6 * fault.size

    def end() -> None:
        sim.store.late_put_rate = 0.0

    return end


def _store_cut(sim: Simulation, fault: Fault) -> Callable[[], None]:
    name = _machine(sim, fault).name
    sim.store.cuts.add(name)
    return lambda: sim.store.cuts.discard(name)


def _store_unmounted(sim: Simulation, fault: Fault) -> Callable[[], None] | None:
    """A machine has an empty folder in place of the store's file system."""
    if not sim.has_proved_place():
        return None
    name = _machine(sim, fault).name
    sim.store.unmounted.add(name)
    return lambda: sim.store.unmounted.discard(name)


def _unreadable_batch(sim: Simulation, fault: Fault) -> None:
    sim.damage_batch(fault.which)


def _delete_records(sim: Simulation, fault: Fault) -> None:
    sim.delete_records(fault.which, fault.size)


def _broker_removes(sim: Simulation, fault: Fault) -> None:
    sim.broker_removes(fault.which, fault.size)


def _hang(sim: Simulation, fault: Fault) -> None:
    sim.producers[fault.which % len(sim.producers)].hangs_s = fault.lasts_s


def _unclean(sim: Simulation, fault: Fault) -> None:
    sim.unclean_election(fault.which, fault.size)


def _out_of_date(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """A user deletes all records. A replica that knows neither the last records nor the deletion becomes the leader."""
    sim.delete_records(fault.which, 1.0)
    return lambda: sim.unclean_election(fault.which, fault.size, is_out_of_date=True)


def _emptied(sim: Simulation, fault: Fault) -> None:
    sim.emptied_election(fault.which)


def _start_back(sim: Simulation, fault: Fault) -> None:
    sim.log_start_goes_back(fault.which)


def _topic_missing(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """No live broker knows the topic for a while. One that is cut off still knows it."""
    sim.cluster.lose_topic(sim.topic)
    return lambda: sim.cluster.bring_back(sim.topic)


def _metadata_tail(sim: Simulation, fault: Fault) -> None:
    sim.metadata_loses_tail(fault.which, fault.size)


def _metadata_head(sim: Simulation, fault: Fault) -> None:
    sim.metadata_loses_head(fault.which, fault.size)


def _compaction(sim: Simulation, fault: Fault) -> None:
    sim.compact_metadata(fault.which, fault.size)


def _retention(sim: Simulation, fault: Fault) -> None:
    sim.change_retention(fault.size)


def _upgrade(sim: Simulation, fault: Fault) -> None:
    sim.upgrade(fault.lasts_s)


def _reload(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """A process reads a file without the topic, or with other values of it, and later the old file again."""
    machine, rules = _machine(sim, fault), _OTHER_RULES[int(fault.size * 2.999)]
    machine.change_file(rules)
    return lambda: machine.change_file(lambda rule: [rule])


_OTHER_RULES: Sequence[Callable[[TopicConfig], Sequence[TopicConfig]]] = (
    lambda rule: [],
    lambda rule: [
        rule.model_copy(update={"local_retention_ms": SAME_AS_TOTAL, "local_retention_bytes": SAME_AS_TOTAL})
    ],
    lambda rule: [rule.model_copy(update={"local_retention_bytes": 0, "segment_bytes": 400, "segment_ms": 1_000})],
)

Kinds = Mapping[str, tuple[float, Apply]]
KINDS: Kinds = {
    "crash": (10, _crash),
    "restart": (4, _restart),
    "power-cut": (2, _power_cut),
    "old-copy": (2, _old_copy),
    "pause": (9, _pause),
    "clock": (4, _clock),
    "disk-full": (3, _disk),
    "disk-full-for-good": (0.7, _disk_for_good),
    "rebalance": (3, _rebalance),
    "broker-stop": (6, _broker_stop),
    "broker-cut-off": (6, _broker_cut_off),
    "broker-slow": (4, _broker_slow),
    "elect": (6, _elect),
    "link-cut": (5, _link_cut),
    "metadata-cut": (5, _metadata_cut),
    "isolate": (4, _isolate),
    "slow-link": (5, _slow_link),
    "lost-answers": (5, _lost_answers),
    "store-down": (3, _store_down),
    "store-errors": (4, _store_errors),
    "store-lost-answers": (4, _store_lost),
    "store-slow": (4, _store_slow),
    "store-late": (3, _store_late),
    "store-truncates": (2, _store_truncates),
    "store-cut": (3, _store_cut),
    "store-refuses-writes": (3, _store_refuses),
    "store-late-puts": (2, _store_late_puts),
    "unreadable-batch": (0.7, _unreadable_batch),
    "delete-records": (4, _delete_records),
    "broker-removes": (3, _broker_removes),
    "hanging-transaction": (3, _hang),
    "unclean-election": (4, _unclean),
    "out-of-date-replica": (2, _out_of_date),
    "emptied-replica": (0.8, _emptied),
    "log-start-goes-back": (1.5, _start_back),
    "topic-missing": (2, _topic_missing),
    "metadata-tail-lost": (1.2, _metadata_tail),
    "metadata-head-lost": (0.3, _metadata_head),
    "compaction": (4, _compaction),
    "retention": (2, _retention),
    "rolling-upgrade": (2, _upgrade),
}
"""The kinds of faults with their weights."""
RELOADS: Kinds = {**KINDS, "reload": (40, _reload)}
"""The same with many reloads. The plans of `KINDS` are without them, so that the seeds that find planted bugs stay."""
UNMOUNTS: Kinds = {**KINDS, "store-unmounted": (40, _store_unmounted)}
"""The same with many file systems that are not mounted."""
LONG_CUTS: Kinds = {**KINDS, "cut-off-for-long": (15, _cut_off_for_long)}
"""The same with machines that are cut off for long."""
DOUBTS: Kinds = {**KINDS, **KINDS_OF_DOUBT}
"""The same with doubts about the past."""
ALL_KINDS: Kinds = {**RELOADS, **UNMOUNTS, **LONG_CUTS, **DOUBTS}


def plan(seed: int, kinds: Kinds = KINDS) -> list[Fault]:
    rng = random.Random(f"{seed}-faults")
    names = list(kinds)
    weights = [kinds[name][0] for name in names]
    faults = []
    for _ in range(rng.randint(9, 16)):
        kind = rng.choices(names, weights)[0]
        lasts_s = rng.choice((0.3, 2.0, 5.0, 12.0)) * rng.uniform(0.5, 1.5)
        faults.append(
            Fault(
                round(rng.uniform(FIRST_S, LAST_S), 3),
                kind,
                rng.randrange(12),
                round(rng.random(), 3),
                round(lasts_s, 3),
            )
        )
    return sorted(faults)


def few_kinds(seed: int) -> Kinds:
    """Returns 3 to 7 random kinds. Two faults of rare kinds meet more often than in a plan with all kinds."""
    kinds = {**RELOADS, **UNMOUNTS, **DOUBTS}
    rng = random.Random(f"{seed}-kinds")
    chosen = rng.sample(sorted(kinds), rng.randint(3, 7))
    return {name: (max(1.0, kinds[name][0]), kinds[name][1]) for name in chosen}
