"""Plans which offsets go into which file. Pure functions of the log's state and of the export's progress.

A tile is a range of one partition's offsets and one file, named by both ends. So the name says what is in the file, and
a run that writes it again writes the same records. Tiles are cut at segment ends, large segments are cut within, and
small segments are combined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from uuid import UUID

from pipeline.source.read_plan import MissingOffsets, ReadRange, tasks_of

Ranges = Callable[[int, int, int], Sequence[ReadRange | MissingOffsets]]
"""Returns the ranges and gaps of a partition from its first to its last offset (inclusive), in order."""

_NAME = re.compile(r"(?:.*/)?(\d+)/(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """A range of offsets. `end_offset` is inclusive."""

    partition: int
    first_offset: int
    end_offset: int

    def file_name(self, topic_id: UUID) -> str:
        return f"{topic_id}/{self.partition}/{self.first_offset}-{self.end_offset}.parquet"


def tile_of_name(name: str) -> Tile | None:
    """Parses a file name. Returns None if it is not the name of a tile."""
    found = _NAME.fullmatch(name)
    return None if found is None else Tile(*map(int, found.groups()))


@dataclass(frozen=True, slots=True)
class Exported:
    """The progress of an export. `next_offsets` is by partition. `pending` was promised and is not written yet.
    `leader_epochs` has, by partition, a leader epoch in which the log had reached the next offset."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    pending: tuple[Tile, ...] = ()
    leader_epochs: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedTile:
    """A tile with its ranges. If `is_promised`, an earlier plan promised this file, or a file that contains it."""

    tile: Tile
    ranges: tuple[ReadRange, ...]
    is_promised: bool = False


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """`tiles` are to be written, with the partitions taking turns. `blocked` tiles are promised but lie beyond a stop.

    `is_last` means that these tiles complete the export. A partition gets new tiles only when its promises are kept."""

    tiles: tuple[PlannedTile, ...]
    blocked: tuple[Tile, ...]
    gaps: tuple[MissingOffsets, ...]
    is_last: bool


def plan_export(
    exported: Exported,
    bounds: Mapping[int, tuple[int, int]],
    stops: Mapping[int, int],
    ranges: Ranges,
    file_bytes: int,
) -> ExportPlan:
    """Plans the tiles. `bounds` has, for each partition, the offset to begin at if nothing is exported yet, and the
    exclusive end. `stops` has the offsets at which a partition cannot be read: a tile that holds one is cut there, and
    the plan has nothing from there on."""
    by_partition: list[list[PlannedTile]] = []
    blocked: list[Tile] = []
    gaps: list[MissingOffsets] = []
    is_last = True
    for partition, (start, end) in sorted(bounds.items()):
        limit = stops.get(partition, end)
        pending = list(chain.from_iterable(_cut(one, limit) for one in exported.pending if one.partition == partition))
        blocked += [tile for tile in pending if partition in stops and tile.end_offset >= limit]
        planned: list[PlannedTile] = []
        for tile in sorted(tile for tile in pending if partition not in stops or tile.end_offset < limit):
            readable = _readable(ranges(partition, tile.first_offset, tile.end_offset), gaps)
            planned.append(PlannedTile(tile, tuple(readable), is_promised=True))
        if pending:
            is_last = False
            by_partition.append(planned)
            continue
        first = exported.next_offsets.get(partition, start)
        readable = _readable(ranges(partition, first, limit - 1), gaps) if first < limit else []
        planned += [
            PlannedTile(Tile(partition, task[0].first_offset, task[-1].end_offset), task)
            for task in tasks_of(readable, file_bytes)
        ]
        by_partition.append(planned)
    turns = chain.from_iterable(zip_longest(*by_partition))
    return ExportPlan(tuple(one for one in turns if one is not None), tuple(blocked), tuple(gaps), is_last)


def _cut(tile: Tile, stop: int) -> Iterator[Tile]:
    if tile.first_offset < stop <= tile.end_offset:
        yield Tile(tile.partition, tile.first_offset, stop - 1)
        yield Tile(tile.partition, stop, tile.end_offset)
    else:
        yield tile


def _readable(ranges: Iterable[ReadRange | MissingOffsets], gaps: list[MissingOffsets]) -> list[ReadRange]:
    found: list[ReadRange] = []
    for one in ranges:
        if isinstance(one, MissingOffsets):
            gaps.append(one)
        else:
            found.append(one)
    return found
