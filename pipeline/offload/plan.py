"""Plans an offload: which partitions a wave takes, and where their tiles end. Pure functions; sizes are estimates.

* A tile [lo, hi) becomes one segment: the batches with lo <= base offset < hi. A batch that begins before hi belongs to
  the tile as a whole. So tiles join without gap or overlap wherever they are cut, and their content depends only on the
  log, and not on the executor or the number of attempts. Tiles are cut at batch ends (`log_probes`), so lo and hi also
  bound the offsets of the segment.
* The last piece of a partition is left alone while it is small and young, because records still arrive. The proxies'
  copiers take it when it is due.
* A wave has few tasks. Each task is a run of tiles of one partition. A wave has about `Wave.max_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.records.record_batch import iterate_batches
from tiers.model.ids import TopicIdPartition

TASKS_PER_CORE = 4
WAVE_BYTES = 10 << 30


@dataclass(frozen=True, slots=True)
class Backlog:
    """The offsets of a partition that may be copied: [`first_offset`, `next_offset`). If `takes_all`, this includes the
    last piece."""

    partition: TopicIdPartition
    first_offset: int
    next_offset: int
    bytes_per_offset: float
    segment_bytes: int
    min_bytes: int
    takes_all: bool = False

    @property
    def size_bytes(self) -> int:
        """The estimated size. It is positive if there are any offsets."""
        return math.ceil(max(0, self.next_offset - self.first_offset) * self.bytes_per_offset)


def tile_ends(backlog: Backlog, max_bytes: int) -> list[int]:
    """Returns the exclusive ends of the tiles from `first_offset` on.

    There is at least one tile if anything is to be copied. Further tiles stay within `max_bytes`. The last piece, if it
    is taken, ends at `next_offset`."""
    offsets_per_tile = max(1, int(backlog.segment_bytes / max(backlog.bytes_per_offset, 1e-9)))
    ends: list[int] = []
    start, taken_bytes = backlog.first_offset, 0
    while start < backlog.next_offset:
        end = min(start + offsets_per_tile, backlog.next_offset)
        size_bytes = int((end - start) * backlog.bytes_per_offset)
        if ends and taken_bytes + size_bytes > max_bytes:
            break
        is_last = end == backlog.next_offset
        if is_last and size_bytes < backlog.min_bytes and not backlog.takes_all:
            break
        ends.append(end)
        start, taken_bytes = end, taken_bytes + size_bytes
    return ends


def last_piece(backlog: Backlog) -> int | None:
    """Returns where the last piece begins that is left alone unless it is old, or None if there is none."""
    ends = tile_ends(backlog, 1 << 62)
    start = ends[-1] if ends else backlog.first_offset
    return start if start < backlog.next_offset else None


@dataclass(frozen=True, slots=True)
class Wave:
    max_tasks: int
    max_bytes: int = WAVE_BYTES

    def choose(self, backlogs: Iterable[Backlog]) -> list[Backlog]:
        """Chooses the largest backlogs, because they take longest."""
        waiting = sorted((one for one in backlogs if one.size_bytes > 0), key=lambda one: -one.size_bytes)
        chosen: list[Backlog] = []
        left_bytes = self.max_bytes
        for one in waiting[: self.max_tasks]:
            if chosen and left_bytes <= 0:
                break
            chosen.append(one)
            left_bytes -= min(one.size_bytes, one.segment_bytes)
        return chosen

    def share_bytes(self, chosen: Sequence[Backlog]) -> dict[TopicIdPartition, int]:
        """Returns the bytes that each partition may take: equal shares, where larger backlogs get what smaller ones
        leave."""
        shares: dict[TopicIdPartition, int] = {}
        left_bytes = self.max_bytes
        for place, one in enumerate(sorted(chosen, key=lambda one: one.size_bytes)):
            shares[one.partition] = min(one.size_bytes, left_bytes // (len(chosen) - place))
            left_bytes -= shares[one.partition]
        return shares


def part_of_tile(records: bytes, hi: int) -> tuple[bytes, int, bool]:
    """Splits whole batches at `hi`.

    Returns the batches that begin before `hi`, the offset after them (-1 if there are none), and whether these complete
    the tile."""
    end, next_offset = 0, -1
    for batch in iterate_batches(records):
        if batch.base_offset >= hi:
            return records[:end], next_offset, True
        end, next_offset = batch.end, batch.next_offset
    return records, next_offset, next_offset >= hi
