"""`ExportLedger`: what an export has promised and written: the next one goes on from there and doubles nothing.

For plain files it is a row of plans beside them, `_tidegate_export/<topic>/<number>.json`, each written once and never
changed: a file is only written when the last plan names it. Of two exporters that want the next plan one gets it, and
the other begins anew from that. A plan repeats the files of the one before that are not there yet, so the last plan and
the listing are all that is known: a run that was killed leaves nothing else.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import UUID

from pipeline.export_plan import Exported, Tile, tile_of_name
from pipeline.export_target import ExportTarget
from pipeline.job import JobError

PLANS = "_tidegate_export"


@dataclass(frozen=True, slots=True)
class TileResult:
    """`stopped_at`: the offset that cannot be read, and then there is no file."""

    tile: Tile
    records: int = 0
    dead_letters: int = 0
    file_bytes: int = 0
    is_new: bool = True
    stopped_at: int | None = None
    reason: str = ""


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
    """Files count when they are there."""

    def __init__(self, target: ExportTarget, topic: str, layout: str) -> None:
        self._target = target
        self._topic = topic
        self._layout = layout
        self._topic_id = UUID(int=0)
        self._plan = _Plan(0, {}, frozenset())

    def load(self, topic_id: UUID) -> Exported:
        self._topic_id = topic_id
        names = self._target.names(f"{PLANS}/{self._topic}/")
        self._plan = self._read(max(names)) if names else _Plan(0, {}, frozenset())
        there = written_tiles(self._target, topic_id)
        if there and not names:
            raise JobError(
                f"{self._target.uri(str(topic_id))} has files of {self._topic}, but no plan of an export to plain files"
            )
        pending = tuple(sorted(self._plan.files - there))
        return Exported(self._plan.next_offsets, pending)

    def reserve(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        if self._plan.files.issuperset(wave):
            return True
        next_offsets = dict(self._plan.next_offsets)
        for tile in wave:
            next_offsets[tile.partition] = max(next_offsets.get(tile.partition, 0), tile.end_offset + 1)
        plan = _Plan(self._plan.number + 1, next_offsets, frozenset((*wave, *left)))
        if not create_bytes(self._target, self._name(plan.number), self._text(plan).encode()):
            return False
        self._plan = plan
        return True

    def commit(self, results: Sequence[TileResult]) -> list[TileResult]:
        return [one for one in results if one.stopped_at is None]

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
            raise JobError(f"{self._target.uri('')} was begun with other columns, or another isolation level")
        next_offsets = {int(partition): offset for partition, offset in text["nextOffsets"].items()}
        return _Plan(int(Path(name).stem), next_offsets, frozenset(Tile(*each) for each in text["files"]))


def written_tiles(target: ExportTarget, topic_id: UUID) -> frozenset[Tile]:
    """Of all files that are there."""
    return frozenset(tile for name in target.names(f"{topic_id}/") if (tile := tile_of_name(name)) is not None)


def create_bytes(target: ExportTarget, name: str, data: bytes) -> bool:
    """False: there was a file of that name."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        source = Path(folder) / "data"
        source.write_bytes(data)
        return target.create(name, source)
