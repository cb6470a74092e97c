"""`World`: what a simulated run consists of, and the faults that need more than a switch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.simulation.clients import SimClient
from tests.support.simulation.cluster import CLUSTER_ID, SimCluster, SimPartition, SimTopic
from tests.support.simulation.compaction import compact
from tests.support.simulation.environment import WALL_START_MS
from tests.support.simulation.expectation import Retention
from tests.support.simulation.loop import START_S, VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.process import SimMachine
from tests.support.simulation.releases import write_new_record
from tests.support.simulation.store import SimStore
from tiers.model.ids import TopicIdPartition
from tiers.storage.object_key import marker_key

METADATA_TOPIC = "__remote_log_metadata"
MAX_CLOCK_SKEW_MS = 60_000


class World:
    loop: VirtualLoop
    cluster: SimCluster
    network: Network
    store: SimStore
    oracle: Oracle
    machines: list[SimMachine]
    clients: list[SimClient]
    topic: SimTopic
    """The topic of the users."""
    cut_off_until_s: float
    """Until when a machine is cut off for long."""
    on_store_served: list[Callable[[str, str, str], None]]
    """Called with a verb, a key and the name of a process when the store has served it."""
    events: list[str]
    _background: asyncio.TaskGroup | None

    def note(self, text: str) -> None:
        self.events.append(f"{self.loop.time() - START_S:8.3f} {text}")

    def wall_ms(self) -> int:
        return WALL_START_MS + self.loop.now_ms

    def begin(self, work: Any) -> asyncio.Task[Any]:
        """Begins work beside the run."""
        assert self._background is not None
        return self._background.create_task(work)

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

    def has_proved_place(self) -> bool:
        """Whether the store has the marker and a copy, and no process has another folder in its place.

        Before the marker is confirmed, nothing proves a place (docs/design.md, safety rule 5)."""
        has_copy = any(one.finished_at_s is not None for one in self.oracle.truth.segments.values())
        return not self.store.unmounted and has_copy and marker_key(CLUSTER_ID) in self.store.objects

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

        self.begin(delete())

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
        ends = [one.next_offset for one in log.batches[-8:] if not is_open_at(log.batches, one.next_offset)]
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
        ends = [one.next_offset for one in log.batches[-30:] if not is_open_at(log.batches, one.next_offset)]
        if ends:
            log.truncate_to(ends[int((len(ends) - 1) * size)])
            self.cluster.elect(partition, unclean=node)

    def metadata_loses_head(self, which: int, size: float) -> None:
        partition = self._metadata_partition(which)
        if partition is None or partition.leader < 0 or not partition.log.batches:
            return
        end = partition.log.batches[int((len(partition.log.batches) - 1) * size * 0.5)].next_offset
        self.oracle.truth.lost_head(partition, end)
        for log in partition.replicas.values():
            log.trim_to(min(end, log.end))

    def metadata_ends(self) -> list[int]:
        """Returns where the partitions of the metadata topic end now, outside of transactions."""
        ends = []
        for partition in self._metadata_partitions():
            batches = partition.log.batches
            found = [one.next_offset for one in batches if not is_open_at(batches, one.next_offset)]
            ends.append(max(found, default=partition.log.start))
        return ends

    def lose_metadata(self, ends: Sequence[int]) -> None:
        """Every replica of the metadata topic loses the records from these offsets on, as in an older copy of it."""
        self.oracle.metadata_is_lost()
        for partition, end in zip(self._metadata_partitions(), ends, strict=True):
            node = next((one.node_id for one in self.cluster.live_brokers()), None)
            if node is None or end < partition.log.start:
                continue
            for log in partition.replicas.values():
                log.truncate_to(end)
            self.cluster.elect(partition, unclean=node)

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

        self.begin(roll())

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
            expected.change_retention(retention)


def is_open_at(batches: Sequence[Any], end: int) -> bool:
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
