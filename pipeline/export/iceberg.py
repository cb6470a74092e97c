"""`IcebergLedger`: exports to an Iceberg table, one commit per wave of files, with the exported offsets in the table.

* The snapshot property `tidegate.offsets` holds the next offsets by topic. The last snapshot with the property counts,
  whatever others have committed since. A table property holds the same text, for when snapshots expire.
* A commit is based on the snapshot whose offsets were read, and is refused if another commit came first. The library
  does not retry it. This module reads the offsets again, and drops the wave if another exporter has moved them.
* The files of a wave are staged, and published right before its commit. No file is used that another run has left:
  its columns, its partition or its history may be others. A wave that does not count is discarded.
* `load` compares the table's columns, its partition spec and the layout of its earlier exports with this export.
  A commit whose table has others by then is dropped.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.snapshots import Snapshot

from pipeline.export.ledger import NO_EPOCHS, OTHER_LAYOUT, TileResult, discard, known_epochs
from pipeline.export.parquet_writer import write_parquet
from pipeline.export.plan import Exported, Tile
from pipeline.export.table_format import TableFormat
from pipeline.export.target import ExportTarget, StagedFile, TargetSettings
from tiers.upkeep.runner import JobError

OFFSETS = "tidegate.offsets"
PLAN_ID = "tidegate.plan-id"
COMMIT_ATTEMPTS = 20


def open_catalog(name: str, properties: Mapping[str, str], target: TargetSettings) -> Catalog:
    """Opens the catalog with `properties` and pyiceberg's own configuration. S3 settings that neither of them gives are
    those of the target.

    Raises `JobError`."""
    # Arrow writes to S3 with Amazon's SDK for C++. By default that SDK sends a checksum after every body, in chunks
    # within chunks. A store that reads only the inner chunks takes the rest for the next request on the connection and
    # answers it with 400 (seen now and then with versitygw 1.8). The SDK reads this variable when a client is created.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    s3 = {
        "s3.endpoint": target.settings.get("endpoint.url"),
        "s3.region": target.settings.get("region"),
        "s3.access-key-id": target.settings.get("access.key.id"),
        "s3.secret-access-key": target.settings.get("secret.access.key"),
    }
    try:
        configured = load_catalog(name, **properties)
        own = {key: value for key, value in s3.items() if value and key not in configured.properties}
        return load_catalog(name, **properties, **own) if target.scheme == "s3" and own else configured
    except Exception as error:
        raise JobError(f"the catalog {name}: {error}") from error


class IcebergLedger:
    """The ledger of an Iceberg table. `plan_id` identifies this run."""

    def __init__(
        self,
        catalog: Catalog,
        table: str,
        target: ExportTarget,
        topic: str,
        schema: pa.Schema,
        layout: str,
        plan_id: str = "",
    ) -> None:
        self._catalog = catalog
        self._name = table
        self._target = target
        self._topic = topic
        self._schema = schema
        self._layout = layout
        self._plan_id = plan_id or str(uuid.uuid4())
        self._topic_id = UUID(int=0)
        self._next: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._leader_epochs: Mapping[int, int] = NO_EPOCHS
        self.table: TableFormat | None = None

    def load(self, topic_id: UUID, leader_epochs: Mapping[int, int] = NO_EPOCHS) -> Exported:
        self._topic_id, self._leader_epochs = topic_id, leader_epochs
        table = self._open()
        self.table = self._checked_format(table)
        self._next = self._next_offsets(table)
        found = offsets_of(table).get(self._topic, {}).get("leaderEpochs", {})
        self._epochs = {int(partition): epoch for partition, epoch in found.items()}
        return Exported(self._next, leader_epochs=self._epochs)

    def promise(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        return True

    def commit(self, results: Sequence[TileResult]) -> list[TileResult] | None:
        """Commits, for each partition, the tiles before the first one that could not be written."""
        next_offsets, counted = dict(self._next), []
        stopped = set()
        for result in results:
            if result.stopped_at is not None or result.tile.partition in stopped:
                stopped.add(result.tile.partition)
                discard(self._target, result.staged)
            else:
                next_offsets[result.tile.partition] = result.tile.end_offset + 1
                counted.append(result)
        if not counted:
            return []
        epochs = known_epochs(self._epochs, [one.tile for one in counted], self._leader_epochs)
        files = [file for one in counted for file in one.data_files]
        staged = [file for one in counted for file in one.staged]
        for _ in range(COMMIT_ATTEMPTS):
            table = self._open()
            if self._next_offsets(table) != self._next or TableFormat.of(table.metadata) != self.table:
                discard(self._target, staged)
                return None
            self._publish(staged)
            try:
                self._append(table, files, next_offsets, epochs)
            except CommitFailedException:
                continue
            except Exception as error:
                raise JobError(
                    f"the commit to {self._name} failed: {error}: run the export again, it continues from the table"
                ) from error
            self._next, self._epochs = next_offsets, epochs
            return counted
        raise JobError(f"{self._name}: other writers always commit first, {COMMIT_ATTEMPTS} attempts failed")

    def _publish(self, staged: list[StagedFile]) -> None:
        """Publishes the files and removes them from the list."""
        while staged:
            if not self._target.publish(staged[-1]):
                where = self._target.uri(staged[-1].name)
                raise JobError(f"the staged file for {where} is gone: run the export again")
            staged.pop()

    def _append(
        self, table: Table, files: Sequence[DataFile], next_offsets: Mapping[int, int], epochs: Mapping[int, int]
    ) -> None:
        known = dict(offsets_of(table))
        known[self._topic] = {
            "topicId": str(self._topic_id),
            "layout": self._layout,
            "next": {str(partition): offset for partition, offset in sorted(next_offsets.items())},
            "leaderEpochs": {str(partition): epoch for partition, epoch in sorted(epochs.items())},
        }
        text = json.dumps(known)
        properties = {OFFSETS: text, PLAN_ID: self._plan_id}
        # Only in this copy of the metadata: a retried commit would no longer be based on the offsets that were read.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        transaction = table.transaction()
        transaction.set_properties({OFFSETS: text})
        if table.name_mapping() is None:  # the files have no field ids
            names = table.schema().name_mapping.model_dump_json()
            transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: names})
        update = transaction.update_snapshot(snapshot_properties=properties)
        merges = table.properties.get(TableProperties.MANIFEST_MERGE_ENABLED, "false").lower() == "true"
        with update.merge_append() if merges else update.fast_append() as append:
            for file in files:
                append.append_data_file(file)
        transaction.commit_transaction()

    def _open(self) -> Table:
        """Opens the table, or creates it if it does not exist."""
        try:
            if not self._catalog.table_exists(self._name):
                namespace = self._name.rpartition(".")[0]
                if namespace:
                    self._catalog.create_namespace_if_not_exists(namespace)
                return self._catalog.create_table_if_not_exists(self._name, schema=self._schema)
            return self._catalog.load_table(self._name)
        except OSError as error:
            raise JobError(
                f"the table {self._name}: {error}: check that its store runs and that --catalog-property and "
                "--to-setting are right"
            ) from error
        except Exception as error:
            raise JobError(f"the table {self._name}: {error}") from error

    def _checked_format(self, table: Table) -> TableFormat:
        """Raises `JobError` if the table has no place for the records of this export."""
        found = TableFormat.of(table.metadata)
        try:
            with tempfile.TemporaryDirectory(prefix="tidegate-") as folder, redirect_stdout(io.StringIO()):
                file = Path(folder) / "empty.parquet"  # the library compares the columns of files alone
                write_parquet(file, (), self._schema)
                parquet_file_to_data_file(PyArrowFileIO(), table.metadata, str(file))
            for _ in found.parts(pa.RecordBatch.from_pylist([], self._schema)):
                pass
        except ValueError as error:
            raise JobError(
                f"the table {self._name} does not fit this export: {_in_a_line(str(error))}: change the table, or "
                "export to another one"
            ) from error
        return found

    def _next_offsets(self, table: Table) -> dict[int, int]:
        found = offsets_of(table).get(self._topic)
        if found is None:
            return {}
        if found["topicId"] != str(self._topic_id):
            raise JobError(
                f"{self._name} holds another topic {self._topic}, with the id {found['topicId']}; the current one has "
                f"{self._topic_id}: export it to another table"
            )
        if found.get("layout") != self._layout:
            raise JobError(f"{self._name} {OTHER_LAYOUT}, or another table")
        return {int(partition): offset for partition, offset in found["next"].items()}


def offsets_of(table: Table) -> dict[str, Any]:
    """Returns `topicId`, `layout` and `next` (by partition) for each topic, from the last snapshot that has them."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        if (text := _offsets_text(snapshot)) is not None:
            return _decoded(text)
        parent_id = snapshot.parent_snapshot_id
        snapshot = None if parent_id is None else table.snapshot_by_id(parent_id)
    # No snapshot has them. Either that snapshot has expired, or the table was rolled back to an earlier one.
    known = table.properties.get(OFFSETS, "{}")
    is_rolled_back = any(_offsets_text(one) == known for one in table.metadata.snapshots)
    return {} if is_rolled_back or table.current_snapshot() is None else _decoded(known)


def _offsets_text(snapshot: Snapshot) -> str | None:
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(OFFSETS)


def _decoded(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise JobError(f"{OFFSETS} was not written by an export: {text[:100]!r}")
    return found


def _in_a_line(text: str) -> str:
    """Returns the library's message. Of its table of all columns, returns the rows that do not fit."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells and cells[0]:
            rows.append(cells)
        elif cells and rows:  # the rest of a row that was wrapped
            rows[-1] = [" ".join(pair).strip() for pair in zip(rows[-1], cells, strict=True)]
    misfits = [f"the table has {table}, and the export {own}" for sign, table, own in rows if sign == "❌"]
    return "; ".join(misfits) or text
