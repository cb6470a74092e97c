"""`IcebergLedger`: exports to an Iceberg table, one commit per wave of files, with the exported offsets in the table.

* The snapshot property `tidegate.offsets` holds the next offsets by topic. The last snapshot with the property counts,
  whatever others have committed since. A table property holds the same text, for when snapshots expire.
* A commit is based on the snapshot whose offsets were read, and is refused if another commit came first. The library
  does not retry it. This module reads the offsets again, and drops the wave if another exporter has moved them.
* Files that no commit names are left from a run that was killed. The next run uses them, because the name of a file
  says what is in it. Nothing is ever deleted.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from pipeline.export.ledger import NO_EPOCHS, OTHER_LAYOUT, TileResult, known_epochs, written_tiles
from pipeline.export.plan import Exported, Tile
from pipeline.export.target import ExportTarget, TargetSettings
from pipeline.spark.job import JobError

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

    def load(self, topic_id: UUID, leader_epochs: Mapping[int, int] = NO_EPOCHS) -> Exported:
        self._topic_id, self._leader_epochs = topic_id, leader_epochs
        table = self._open()
        self._next = self._next_offsets(table)
        found = offsets_of(table).get(self._topic, {}).get("leaderEpochs", {})
        self._epochs = {int(partition): epoch for partition, epoch in found.items()}
        written = tuple(
            tile
            for tile in written_tiles(self._target, topic_id)
            if tile.first_offset >= self._next.get(tile.partition, 0)
        )
        return Exported(self._next, written=written, leader_epochs=self._epochs)

    def promise(self, wave: Sequence[Tile], left: Sequence[Tile]) -> bool:
        return True

    def commit(self, results: Sequence[TileResult]) -> list[TileResult] | None:
        """Commits, for each partition, the tiles before the first one that could not be written."""
        next_offsets, counted = dict(self._next), []
        stopped = set()
        for result in results:
            if result.stopped_at is not None:
                stopped.add(result.tile.partition)
            elif result.tile.partition not in stopped:
                next_offsets[result.tile.partition] = result.tile.end_offset + 1
                counted.append(result)
        if not counted:
            return []
        epochs = known_epochs(self._epochs, [one.tile for one in counted], self._leader_epochs)
        files = [self._target.uri(one.tile.file_name(self._topic_id)) for one in counted if one.records]
        for _ in range(COMMIT_ATTEMPTS):
            table = self._open()
            if self._next_offsets(table) != self._next:
                return None
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

    def _append(
        self, table: Table, files: list[str], next_offsets: Mapping[int, int], epochs: Mapping[int, int]
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
        if files:
            transaction.add_files(files, snapshot_properties=properties, check_duplicate_files=False)
        else:
            with transaction.update_snapshot(snapshot_properties=properties).fast_append():
                pass
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
