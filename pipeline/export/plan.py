"""Which offsets go into which file: pure functions of what the log has and what an export has written so far.

A tile is a range of one partition's offsets and one file, named by both ends, so that its name says what is in it and a
run that writes it again gives the same records. Tiles are cut where segments end, large ones within, small segments
are put together. Files that are there already are taken as they are, and what lies between them is cut anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from uuid import UUID

from pipeline.source.read_plan import Gap, ReadRange, tasks_of

Ranges = Callable[[int, int, int], Sequence[ReadRange | Gap]]
"""Of a partition, its first and its last offset: what to read, in order."""

_NAME = re.compile(r"(?:.*/)?(\d+)/(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """`end_offset` is inclusive."""

    partition: int
    first_offset: int
    end_offset: int

    def file_name(self, topic_id: UUID) -> str:
        return f"{topic_id}/{self.partition}/{self.first_offset}-{self.end_offset}.parquet"


def tile_of_name(name: str) -> Tile | None:
    """None: the name is not one of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else Tile(*map(int, found.groups()))


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has come to. `next_offsets` by partition; `pending` was promised and is not written yet, `written`
    are files that may be taken as they are, from `next_offsets` on."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    pending: tuple[Tile, ...] = ()
    written: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedTile:
    """`is_promised`: somebody said before that this file, or one that it is a part of, would be written."""

    tile: Tile
    ranges: tuple[ReadRange, ...]
    is_promised: bool = False


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """`tiles` are to be written, in turns of the partitions; `blocked` are promised but lie beyond a stop.

    `is_last`: with the tiles everything is exported. A partition gets nothing new before its promises are kept."""

    tiles: tuple[PlannedTile, ...]
    blocked: tuple[Tile, ...]
    gaps: tuple[Gap, ...]
    is_last: bool


def plan_export(
    exported: Exported,
    bounds: Mapping[int, tuple[int, int]],
    stops: Mapping[int, int],
    ranges: Ranges,
    file_bytes: int,
) -> ExportPlan:
    """`bounds` by partition: where to begin when nothing is exported yet, and the exclusive end. `stops`: offsets at
    which a partition cannot be read; a tile that holds one is cut there, and nothing from there on is planned."""
    by_partition: list[list[PlannedTile]] = []
    blocked: list[Tile] = []
    gaps: list[Gap] = []
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
        written = sorted(tile for tile in exported.written if tile.partition == partition)
        for begin, last, is_written in _pieces(first, limit - 1, written):
            readable = _readable(ranges(partition, begin, last), gaps)
            if is_written:
                planned.append(PlannedTile(Tile(partition, begin, last), tuple(readable)))
                continue
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


def _readable(ranges: Iterable[ReadRange | Gap], gaps: list[Gap]) -> list[ReadRange]:
    found: list[ReadRange] = []
    for one in ranges:
        if isinstance(one, Gap):
            gaps.append(one)
        else:
            found.append(one)
    return found


def _pieces(first: int, last: int, written: Sequence[Tile]) -> Iterator[tuple[int, int, bool]]:
    """What is written already, and what lies between. Of files that overlap the one that begins first counts."""
    position = first
    for tile in written:
        if tile.first_offset < position or tile.end_offset > last:
            continue
        if tile.first_offset > position:
            yield position, tile.first_offset - 1, False
        yield tile.first_offset, tile.end_offset, True
        position = tile.end_offset + 1
    if position <= last:
        yield position, last, False
