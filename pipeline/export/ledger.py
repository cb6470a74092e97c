"""`ExportLedger`: what an export has promised and written: the next one goes on from there and doubles nothing.

For plain files it is a row of plans beside them, `_tidegate_export/<topic>/<number>.json`, each written once and never
changed: a file is only written when the last plan names it. Of two exporters that want the next plan one gets it, and
the other begins anew from that. A plan repeats the files of the one before that are not there yet, so the last plan and
the listing are all that is known.

Files are staged by the tasks and published here, each partition's in the order of its offsets and no further than to
the first that could not be made: whoever lists them at any moment sees no record beyond a hole. When one is published
the last plan still names it, whoever made that plan, and a plan that cuts one discards what is staged of it: no promise
is kept whole and in parts. What a run that was killed has staged, the next one discards.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import UUID

from pipeline.export.plan import Exported, Tile, tile_of_name
from pipeline.export.target import ExportTarget, StagedFile
from pipeline.job import JobError
from tiers.errors import RemoteStorageError

logger = logging.getLogger(__name__)

PLANS = "_tidegate_export"


@dataclass(frozen=True, slots=True)
class TileResult:
    """`stopped_at`: the offset that cannot be read, and then there is no file. `staged`: it cannot be seen yet."""

    tile: Tile
    records: int = 0
    dead_letters: int = 0
    file_bytes: int = 0
    stopped_at: int | None = None
    reason: str = ""
    staged: StagedFile | None = None


class ExportLedger(Protocol):
    """Kept by the driver alone."""

    def load(self, topic_id: UUID) -> Exported:
        """As of now. Raises `JobError` when what is there belongs to something else."""

    def reserve(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        """Before `wave` is written; `left` are promised and come later. False: somebody else was first, load anew."""

    def commit(self, results: Sequence[TileResult]) -> list[TileResult] | None:
        """Those of a wave, given in its order, that count from now on. None: somebody else was first, none does."""


@dataclass(frozen=True, slots=True)
class _Plan:
    number: int
    next_offsets: dict[int, int]
    files: frozenset[Tile]


class ParquetLedger:
    """Files count when they are published."""

    def __init__(self, target: ExportTarget, topic: str, layout: str) -> None:
        self._target = target
        self._topic = topic
        self._layout = layout
        self._topic_id = UUID(int=0)
        self._plan = _Plan(0, {}, frozenset())

    def load(self, topic_id: UUID) -> Exported:
        self._topic_id = topic_id
        staged = self._staged()
        is_begun = self._read_last()
        there = written_tiles(self._target, topic_id)
        if there and not is_begun:
            raise JobError(
                f"{self._target.uri(str(topic_id))} has files of {self._topic}, but no plan of an export to plain files"
            )
        written = sorted(there)
        pending = [tile for tile in sorted(self._plan.files) if _written_with(tile, written) is None]
        # They were staged before the plan was read, and every plan repeats what is not there yet.
        self._discard(one for one in staged if tile_of_name(one.name) not in pending)
        return Exported(self._plan.next_offsets, tuple(pending))

    def reserve(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        if self._plan.files.issuperset(wave):
            return True
        next_offsets = dict(self._plan.next_offsets)
        for tile in wave:
            next_offsets[tile.partition] = max(next_offsets.get(tile.partition, 0), tile.end_offset + 1)
        plan = _Plan(self._plan.number + 1, next_offsets, frozenset((*wave, *left)))
        if not create_bytes(self._target, self._name(plan.number), self._text(plan).encode()):
            return False
        promised = sorted(self._plan.files)
        cut = {whole for tile in plan.files if (whole := _written_with(tile, promised)) not in (None, tile)}
        self._plan = plan
        if cut:
            # Of another one that looked before this plan was there, and has not published yet: it cannot any more.
            self._discard(one for one in self._staged() if tile_of_name(one.name) in cut)
        return True

    def commit(self, results: Sequence[TileResult]) -> list[TileResult]:
        """Of each partition what comes before the first tile that cannot be read, or that another exporter cut."""
        there = written_tiles(self._target, self._topic_id)
        written = sorted(there)
        counted: list[TileResult] = []
        stopped: set[int] = set()
        for result in sorted(results, key=lambda one: one.tile):
            tile, staged = result.tile, result.staged
            if tile.partition in stopped or not self._counts(result, written):
                stopped.add(tile.partition)
            else:
                counted.append(replace(result, staged=None))
                if staged is not None and tile not in there:
                    self._publish(tile, staged)
                    continue
            if staged is not None:
                self._discard([staged])
        return counted

    def _counts(self, result: TileResult, written: Sequence[Tile]) -> bool:
        if result.stopped_at is not None:
            return False
        within = _written_with(result.tile, written)
        return result.staged is None or within == result.tile or (within is None and self._is_promised(result.tile))

    def _publish(self, tile: Tile, staged: StagedFile) -> None:
        if not self._target.publish(staged) and tile not in written_tiles(self._target, self._topic_id):
            where = self._target.uri(staged.name)
            raise JobError(f"what was staged of {where} is gone: run the export again, it goes on")

    def _is_promised(self, tile: Tile) -> bool:
        """By the last plan, too, if that is another one's."""
        try:
            self._target.read(self._name(self._plan.number + 1))
        except FileNotFoundError:
            return True
        plan = self._plan
        self._read_last()
        last, self._plan = self._plan, plan
        return tile in last.files

    def _staged(self) -> list[StagedFile]:
        try:
            return self._target.staged(f"{self._topic_id}/")
        except RemoteStorageError as error:  # to list uploads is a right of its own
            logger.warning("what was staged cannot be listed", extra={"topic": self._topic, "error": str(error)})
            return []

    def _discard(self, staged: Iterable[StagedFile]) -> None:
        for one in staged:
            try:
                self._target.discard(one)
            except RemoteStorageError as error:
                logger.warning("staged file not discarded", extra={"file": one.name, "error": str(error)})

    def _read_last(self) -> bool:
        """False: there is none."""
        names = self._target.names(f"{PLANS}/{self._topic}/")
        self._plan = self._read(max(names)) if names else _Plan(0, {}, frozenset())
        return bool(names)

    def _name(self, number: int) -> str:
        return f"{PLANS}/{self._topic}/{number:08}.json"

    def _text(self, plan: _Plan) -> str:
        return json.dumps(
            {
                "topic": self._topic,
                "topicId": str(self._topic_id),
                "layout": self._layout,
                "nextOffsets": plan.next_offsets,
                "files": [[tile.partition, tile.first_offset, tile.end_offset] for tile in sorted(plan.files)],
            }
        )

    def _read(self, name: str) -> _Plan:
        text = json.loads(self._target.read(name))
        if text["topicId"] != str(self._topic_id):
            raise JobError(
                f"{self._target.uri('')} holds another topic {self._topic}, with the id {text['topicId']}; the one of "
                f"now has {self._topic_id}: export it to another place"
            )
        if text["layout"] != self._layout:
            raise JobError(
                f"{self._target.uri('')} was begun with other columns, or another isolation level: give those again, "
                "or another place"
            )
        next_offsets = {int(partition): offset for partition, offset in text["nextOffsets"].items()}
        return _Plan(int(Path(name).stem), next_offsets, frozenset(Tile(*each) for each in text["files"]))


def _written_with(tile: Tile, written: Sequence[Tile]) -> Tile | None:
    """That one of them which has all its offsets; they are sorted and do not overlap."""
    place = bisect_right(written, Tile(tile.partition, tile.first_offset, sys.maxsize)) - 1
    if place < 0 or written[place].partition != tile.partition or written[place].end_offset < tile.end_offset:
        return None
    return written[place]


def written_tiles(target: ExportTarget, topic_id: UUID) -> frozenset[Tile]:
    """Of all files that are there."""
    return frozenset(tile for name in target.names(f"{topic_id}/") if (tile := tile_of_name(name)) is not None)


def create_bytes(target: ExportTarget, name: str, data: bytes) -> bool:
    """False: there was a file of that name."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        source = Path(folder) / "data"
        source.write_bytes(data)
        return target.create(name, source)
