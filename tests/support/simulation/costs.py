"""`Costs`: what faults cost in a run, though no rule is violated: time without copying, and records in neither tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.simulation.cluster import SimPartition
from tests.support.simulation.unfinished import whole_log

if TYPE_CHECKING:
    from tests.support.simulation.simulation import Simulation

_ROUNDS_S = 5.0
"""How long after `segment.ms` a healthy owner takes to copy a segment."""


class Costs:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.uncopied_s = 0
        """The seconds in which records were due and not copied, of all partitions together."""

    def note_second(self) -> None:
        """Called each second."""
        sim = self._sim
        due_ms = sim.wall_ms() - sim.settings["topics"][0]["segment.ms"] - 1000 * _ROUNDS_S
        for partition, expected in sim.oracle.expected.items():
            copied_to = sim.oracle.truth.copied_to.get((partition.topic.topic_id, partition.index), 0)
            first = expected.batch_at(max(copied_to, partition.log.start))
            if first is not None and first.timestamp_ms < due_ms and first.next_offset <= partition.log.high_watermark:
                self.uncopied_s += 1

    def records_in_no_tier(self) -> int:
        """Returns how many records were neither deleted nor expired, and are in neither tier now."""
        return sum(map(self._missing_of, self._sim.oracle.expected))

    def _missing_of(self, partition: SimPartition) -> int:
        oracle, local = self._sim.oracle, {one.data for one in partition.log.batches}
        expected, now_ms = oracle.expected[partition], self._sim.wall_ms()
        finished = oracle.truth.finished((partition.topic.topic_id, partition.index))
        logs = [whole_log(oracle.store, one) or b"" for one in finished if not one.is_forgotten]
        return sum(
            one.next_offset - one.base_offset
            for one in expected.batches
            if one.next_offset > expected.deleted_to
            and not expected.may_have_expired(one, now_ms)
            and one.data not in local
            and not any(one.data in log for log in logs)
        )
