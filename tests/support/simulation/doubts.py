"""Faults that leave a doubt about the past: metadata that is lost in silence, and a store or a process that is away.

They have a table of their own (`faults.DOUBTS`), so that the plans of other tables stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tests.support.simulation.cluster import SimPartition
from tests.support.simulation.store import refuse
from tests.support.simulation.truth import MARKS
from tests.support.simulation.world import METADATA_TOPIC, is_open_at
from tiers.storage.object_key import LOG_SUFFIX, parse_segment_key

if TYPE_CHECKING:
    from tests.support.simulation.faults import Apply, Fault
    from tests.support.simulation.simulation import Simulation


def _restart_all(sim: Simulation, *, keep_state: bool) -> Callable[[], None]:
    """Ends all processes. Returns how they start again."""
    for machine in sim.machines:
        machine.crash()

    def start() -> None:
        for machine in sim.machines:
            machine.start(keep_state=keep_state)

    return start


def _silent_loss(sim: Simulation, fault: Fault) -> Callable[[], None] | None:
    """The metadata topic ends right before or right behind a record of some kind, and no process has a state."""
    marks = sim.oracle.truth.marks.get(MARKS[int(fault.size * (len(MARKS) - 0.001))])
    if not marks:
        return None
    number, offset = marks[-1]
    batches = sim.cluster.topics[METADATA_TOPIC].partitions[number].log.batches
    outside = [one.next_offset for one in batches if not is_open_at(batches, one.next_offset)]
    before, behind = [end for end in outside if end <= offset], [end for end in outside if end > offset]
    start = _restart_all(sim, keep_state=False)
    ends = sim.metadata_ends()
    ends[number] = behind[0] if behind and fault.which % 2 else max(before, default=0)
    sim.lose_metadata(ends)
    return start


def _old_metadata(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """The brokers restore the whole metadata topic from a copy that was made when the fault began."""
    ends = sim.metadata_ends()

    def end() -> None:
        start = _restart_all(sim, keep_state=fault.size < 0.5)
        if ends:
            sim.lose_metadata(ends)
        start()

    return end


def _store_refuses_reads(sim: Simulation, fault: Fault) -> None:
    """The store takes what is written and refuses GET and DELETE, until all faults end."""
    sim.until_healed(refuse(sim.store, ("GET", "DELETE")))


def _frozen_owner(sim: Simulation, fault: Fault) -> None:
    """A process freezes after the first object of a segment, until all faults end. Then it writes the second one."""

    def freeze(verb: str, key: str, name: str) -> None:
        parsed = parse_segment_key(key)
        if verb != "PUT" or parsed is None or parsed.suffix != LOG_SUFFIX:
            return
        end()
        machine = next(one for one in sim.machines if one.name == name)
        machine.pause()
        sim.until_healed(machine.go_on)

    def end() -> None:
        if freeze in sim.on_store_served:
            sim.on_store_served.remove(freeze)

    sim.on_store_served.append(freeze)
    sim.until_healed(end)


def _late_log_start(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """A user deletes records through a slow proxy while an unclean election cuts the log."""
    name = sim.machines[fault.which % len(sim.machines)].name
    sim.network.slow_ms[name] = 6_000
    sim.delete_records(fault.which, fault.size)
    sim.loop.later(0.3, sim.unclean_election, fault.which, fault.size)

    def end() -> None:
        sim.network.slow_ms.pop(name, None)

    return end


def _there_and_back(sim: Simulation, fault: Fault) -> Callable[[], None] | None:
    """A leader is cut off, a replica without the last records leads meanwhile, and then the old leader with its log."""
    partitions = list(sim.cluster.partitions())
    partition = partitions[fault.which % len(partitions)]
    old = partition.leader
    new = next((one.node_id for one in sim.cluster.live_brokers() if one.node_id != old), None)
    if old < 0 or new is None or not sim.may_lose_broker(old):
        return None
    log = partition.replicas[new]
    ends = [one.next_offset for one in log.batches[-8:] if not is_open_at(log.batches, one.next_offset)]
    fork = ends[int((len(ends) - 1) * fault.size)] if ends else log.end
    for producer in sim.producers:
        producer.hangs_s = fault.lasts_s
    sim.groups.split(old)
    sim.cluster.cut_off(old)
    log.truncate_to(fork)
    sim.cluster.elect(partition, unclean=new)
    sim.compact_metadata(fault.which, fault.size)

    def end() -> None:
        sim.groups.heal(old)
        sim.cluster.rejoin(old)
        if sim.cluster.brokers[old].is_up:
            _lose_metadata_from(sim, partition, fork)
            sim.cluster.elect(partition, unclean=old)

    return end


def _lose_metadata_from(sim: Simulation, partition: SimPartition, fork: int) -> None:
    if partition.topic.name == METADATA_TOPIC:
        sim.oracle.truth.lost(partition, fork)
        for tell in sim.oracle.on_metadata_cut:
            tell(partition.index, fork)


def _spool_full(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """The spool's disk is full, and the disk of the state is not. Files can still be read."""
    machine = sim.machines[fault.which % len(sim.machines)]
    machine.is_spool_full = True

    def end() -> None:
        machine.is_spool_full = False

    return end


def _earliest(sim: Simulation, fault: Fault) -> None:
    """Clients ask for the earliest offset again and again."""
    for client in sim.clients:
        sim.begin(client.ask_for_earliest(until_s=sim.loop.time() + fault.lasts_s))


def _own_total(sim: Simulation, fault: Fault) -> Callable[[], None]:
    """For a while, all files have a total retention that is not the brokers': it is unlimited. It stays recorded."""
    for machine in sim.machines:
        machine.change_file(lambda rule: [rule.model_copy(update={"total_retention_minutes": -1})])

    def end() -> None:
        for machine in sim.machines:
            machine.change_file(lambda rule: [rule])

    return end


KINDS_OF_DOUBT: Mapping[str, tuple[float, Apply]] = {
    "metadata-lost-in-silence": (6, _silent_loss),
    "metadata-restored": (3, _old_metadata),
    "store-refuses-reads": (6, _store_refuses_reads),
    "frozen-owner": (6, _frozen_owner),
    "late-log-start": (4, _late_log_start),
    "there-and-back": (5, _there_and_back),
    "spool-full": (4, _spool_full),
    "earliest": (8, _earliest),
    "own-total": (6, _own_total),
}
