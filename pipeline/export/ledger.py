"""`ExportLedger`: records what an export has promised and written, so that the next run continues without duplicates.

For plain files the ledger is a sequence of plans beside them, `_tidegate_export/<topic>/<number>.json`. Each plan is
written once and never changed, and a file is only written if the last plan names it. If two exporters want to write the
next plan, one succeeds, and the other starts again from that plan. A plan repeats the files of the previous plan that
do not exist yet, so the last plan and the listing hold the whole state.

Tasks stage files, and the ledger publishes them: each partition's files in the order of their offsets, and only up to
the first one that could not be written. So a reader who lists the files at any moment sees no record beyond a hole. A
file is only published while the last plan still names it, whichever exporter wrote that plan. A plan that cuts a
promised file in two discards the staged one, so a file never appears both whole and in parts. The next run discards the
staged files of a run that was killed.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from pipeline.export.plan import Exported, Tile, tile_of_name
from pipeline.export.target import ExportTarget, StagedFile
from tiers.errors import RemoteStorageError
from tiers.upkeep.runner import JobError

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile

    from pipeline.export.table_format import TableFormat

logger = logging.getLogger(__name__)

PLANS = "_tidegate_export"
OTHER_LAYOUT = "was begun with other columns, another value schema or another isolation level: use the same ones"
NO_EPOCHS: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TileResult:
    """The result of one tile. `stopped_at` is the offset that cannot be read; the tile then has no file.

    `lost` holds inclusive ranges that were planned, and that neither tier had any more when the task came to them.

    `staged` are the files that are not visible yet: one for plain files. A table has one or more for each partition
    value, and none without records. `data_files` describes the files of a table, in the same order."""

    tile: Tile
    records: int = 0
    dead_letters: int = 0
    file_bytes: int = 0
    stopped_at: int | None = None
    reason: str = ""
    lost: tuple[tuple[int, int], ...] = ()
    staged: tuple[StagedFile, ...] = ()
    data_files: tuple[DataFile, ...] = ()


class ExportLedger(Protocol):
    """The state of an export. Only the driver uses it."""

    @property
    def table(self) -> TableFormat | None:
        """The columns and partitions of the table, as `load` has found them. None: plain files."""

    def load(self, topic_id: UUID, leader_epochs: Mapping[int, int] = NO_EPOCHS) -> Exported:
        """Returns the current state. Raises `JobError` if the target holds something else.

        `leader_epochs` are those of the leaders that told the bounds of the next plan, by partition. The ledger keeps
        them with the offsets that it records from then on."""

    def promise(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        """Promises `wave` before it is written; `left` is promised too and written later. Returns False if another
        exporter was first. The caller must then load the state again."""

    def commit(self, results: Sequence[TileResult]) -> list[TileResult] | None:
        """Commits the results of a wave, given in its order, and returns those that count. Returns None if another
        exporter was first; then none of them counts."""


@dataclass(frozen=True, slots=True)
class _Plan:
    number: int
    next_offsets: dict[int, int]
    files: frozenset[Tile]
    leader_epochs: dict[int, int] = field(default_factory=dict)


class ParquetLedger:
    """A ledger for plain files. A file counts when it is published."""

    table = None

    def __init__(self, target: ExportTarget, topic: str, layout: str) -> None:
        self._target = target
        self._topic = topic
        self._layout = layout
        self._topic_id = UUID(int=0)
        self._plan = _Plan(0, {}, frozenset())
        self._leader_epochs: Mapping[int, int] = NO_EPOCHS

    def load(self, topic_id: UUID, leader_epochs: Mapping[int, int] = NO_EPOCHS) -> Exported:
        self._topic_id, self._leader_epochs = topic_id, leader_epochs
        staged = self._staged()
        is_begun = self._read_last()
        if not is_begun and self._target.names(f"{topic_id}/"):
            raise JobError(
                f"{self._target.uri(str(topic_id))} has files of {self._topic}, but no plan of an export to plain files"
            )
        written = sorted(written_tiles(self._target, topic_id))
        pending = [tile for tile in sorted(self._plan.files) if _written_with(tile, written) is None]
        # These files were staged before the plan was read, and every plan repeats the files that do not exist yet.
        discard(self._target, (one for one in staged if tile_of_name(one.name) not in pending))
        return Exported(self._plan.next_offsets, tuple(pending), leader_epochs=self._plan.leader_epochs)

    def promise(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        if self._plan.files.issuperset(wave):
            return True
        next_offsets = dict(self._plan.next_offsets)
        for tile in wave:
            next_offsets[tile.partition] = max(next_offsets.get(tile.partition, 0), tile.end_offset + 1)
        plan = _Plan(
            self._plan.number + 1,
            next_offsets,
            frozenset((*wave, *left)),
            known_epochs(self._plan.leader_epochs, wave, self._leader_epochs),
        )
        if not create_bytes(self._target, self._name(plan.number), self._text(plan).encode()):
            return False
        promised = sorted(self._plan.files)
        cut = {whole for tile in plan.files if (whole := _written_with(tile, promised)) not in (None, tile)}
        self._plan = plan
        if cut:
            # Another exporter staged these files before this plan existed. It has not published them, and no longer
            # can.
            discard(self._target, (one for one in self._staged() if tile_of_name(one.name) in cut))
        return True

    def commit(self, results: Sequence[TileResult]) -> list[TileResult]:
        """Publishes, for each partition, the tiles before the first one that cannot be read or that another exporter
        has cut."""
        there = written_tiles(self._target, self._topic_id)
        written = sorted(there)
        counted: list[TileResult] = []
        stopped: set[int] = set()
        for result in sorted(results, key=lambda one: one.tile):
            tile, staged = result.tile, result.staged
            if tile.partition in stopped or not self._counts(result, written):
                stopped.add(tile.partition)
            else:
                counted.append(replace(result, staged=()))
                if tile not in there:
                    for one in staged:
                        self._publish(tile, one)
                    continue
            discard(self._target, staged)
        return counted

    def _counts(self, result: TileResult, written: Sequence[Tile]) -> bool:
        if result.stopped_at is not None:
            return False
        within = _written_with(result.tile, written)
        return within == result.tile or (within is None and self._is_promised(result.tile))

    def _publish(self, tile: Tile, staged: StagedFile) -> None:
        if not self._target.publish(staged) and tile not in written_tiles(self._target, self._topic_id):
            where = self._target.uri(staged.name)
            raise JobError(f"the staged file for {where} is gone: run the export again, it continues from its plan")

    def _is_promised(self, tile: Tile) -> bool:
        """Whether the last plan names the tile, even if another exporter wrote that plan."""
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
            found = self._target.staged(f"{self._topic_id}/")
        except RemoteStorageError as error:  # listing uploads needs a permission of its own
            logger.warning("staged files cannot be listed", extra={"topic": self._topic, "error": str(error)})
            return []
        return [one for one in found if tile_of_name(one.name) is not None]  # others are those of a table

    def _read_last(self) -> bool:
        """Reads the last plan. Returns False if there is none."""
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
                "leaderEpochs": plan.leader_epochs,
                "files": [[tile.partition, tile.first_offset, tile.end_offset] for tile in sorted(plan.files)],
            }
        )

    def _read(self, name: str) -> _Plan:
        text = json.loads(self._target.read(name))
        if text["topicId"] != str(self._topic_id):
            raise JobError(
                f"{self._target.uri('')} holds another topic {self._topic}, with the id {text['topicId']}; the current "
                f"one has {self._topic_id}: export it to another place"
            )
        if text["layout"] != self._layout:
            raise JobError(f"{self._target.uri('')} {OTHER_LAYOUT}, or another place")
        next_offsets = {int(partition): offset for partition, offset in text["nextOffsets"].items()}
        epochs = {int(partition): epoch for partition, epoch in text.get("leaderEpochs", {}).items()}
        return _Plan(int(Path(name).stem), next_offsets, frozenset(Tile(*each) for each in text["files"]), epochs)


def known_epochs(known: Mapping[int, int], wave: Iterable[Tile], asked: Mapping[int, int]) -> dict[int, int]:
    """Returns the leader epochs to record with the offsets behind `wave`. `asked` are those of the last `load`."""
    return {**known, **{tile.partition: asked[tile.partition] for tile in wave if tile.partition in asked}}


def _written_with(tile: Tile, written: Sequence[Tile]) -> Tile | None:
    """Returns the tile in `written` that contains all offsets of `tile`, or None. `written` is sorted, without
    overlaps."""
    place = bisect_right(written, Tile(tile.partition, tile.first_offset, sys.maxsize)) - 1
    if place < 0 or written[place].partition != tile.partition or written[place].end_offset < tile.end_offset:
        return None
    return written[place]


def discard(target: ExportTarget, staged: Iterable[StagedFile]) -> None:
    """Deletes staged files, as far as the store allows."""
    for one in staged:
        try:
            target.discard(one)
        except RemoteStorageError as error:
            logger.warning("a staged file was not discarded", extra={"file": one.name, "error": str(error)})


def written_tiles(target: ExportTarget, topic_id: UUID) -> frozenset[Tile]:
    """Returns the tiles of all files that exist."""
    return frozenset(tile for name in target.names(f"{topic_id}/") if (tile := tile_of_name(name)) is not None)


def create_bytes(target: ExportTarget, name: str, data: bytes) -> bool:
    """Creates a file. Returns False if a file of that name exists."""
    with tempfile.TemporaryDirectory(prefix="tidegate-") as folder:
        source = Path(folder) / "data"
        source.write_bytes(data)
        return target.create(name, source)
