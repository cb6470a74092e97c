"""The properties by which an Iceberg table knows its exports, and the exports that it refuses."""

from __future__ import annotations

import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog

from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export.iceberg import IcebergLedger, offsets_of, open_catalog
from pipeline.export.ledger import TileResult, discard
from pipeline.export.parquet_writer import write_parts
from pipeline.export.plan import Tile
from pipeline.export.target import ExportTarget, TargetSettings, open_target
from pipeline.export.typed_values import TypedValues
from pipeline.worker import worker
from tests.support.servers.versitygw import VersityGateway
from tiers.upkeep.runner import JobError

TOPIC_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
TABLE = "db.orders"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "warehouse").mkdir()
    warehouse = (tmp_path / "warehouse").as_uri()
    return load_catalog("lake", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=warehouse)


@pytest.fixture
def target(tmp_path: Path) -> ExportTarget:
    return open_target(TargetSettings((tmp_path / "lake").as_uri()))


def ledger(catalog: Catalog, target: ExportTarget, topic: str = "orders") -> IcebergLedger:
    return IcebergLedger(catalog, TABLE, target, topic, KAFKA_COLUMNS.schema, "layout")


def written(one: IcebergLedger, target: ExportTarget, tmp_path: Path, tile: Tile) -> TileResult:
    """A tile as a task stages it."""
    rows = range(tile.first_offset, tile.end_offset + 1)
    batch = pa.RecordBatch.from_pylist(
        [{"value": b"v", "topic": "orders", "partition": tile.partition, "offset": offset} for offset in rows],
        schema=KAFKA_COLUMNS.schema,
    )
    return staged(one, target, tmp_path, tile, batch)


def staged(one: IcebergLedger, target: ExportTarget, folder: Path, tile: Tile, batch: pa.RecordBatch) -> TileResult:
    assert one.table is not None
    (part,) = write_parts(folder, [batch], batch.schema, one.table.parts)
    name = f"{TOPIC_ID}/{uuid.uuid4()}.parquet"
    data_file = one.table.data_file(part, target.uri(name))
    return TileResult(tile, part.records, staged=(target.stage(name, part.path),), data_files=(data_file,))


def offsets(catalog: Catalog) -> list[int]:
    found: list[int] = catalog.load_table(TABLE).scan().to_arrow()["offset"].to_pylist()
    return sorted(found)


def test_a_commit_is_as_far_as_no_tile_is_missing(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(catalog, target)
    assert one.load(TOPIC_ID, {0: 4, 1: 7, 2: 9}).next_offsets == {}
    tiles = [Tile(0, 0, 4), Tile(1, 0, 2), Tile(0, 5, 9), Tile(0, 10, 14)]
    results = [written(one, target, tmp_path, tile) for tile in tiles]
    discard(target, results[2].staged)
    results[2] = TileResult(tiles[2], stopped_at=7)
    assert one.commit(results) == [results[0], results[1]]
    assert offsets(catalog) == [0, 0, 1, 1, 2, 2, 3, 4]
    again = ledger(catalog, target).load(TOPIC_ID)
    assert (again.next_offsets, again.leader_epochs) == ({0: 5, 1: 3}, {0: 4, 1: 7})
    assert target.staged(f"{TOPIC_ID}/") == []


class Overtaken(IcebergLedger):
    """Another one commits after this one has read the offsets."""

    overtaking: Any = None

    def _append(self, *arguments: Any) -> None:
        overtaking, self.overtaking = self.overtaking, None
        if overtaking is not None:
            overtaking()
        super()._append(*arguments)


def test_a_commit_that_is_overtaken_does_not_count(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = Overtaken(catalog, TABLE, target, "orders", KAFKA_COLUMNS.schema, "layout")
    other = ledger(catalog, target)
    one.load(TOPIC_ID)
    other.load(TOPIC_ID)
    one.overtaking = lambda: other.commit([written(other, target, tmp_path, Tile(0, 0, 3))])
    assert one.commit([written(one, target, tmp_path, Tile(0, 0, 9))]) is None
    assert offsets(catalog) == [0, 1, 2, 3]
    assert one.load(TOPIC_ID).next_offsets == {0: 4}


def test_commits_of_others_do_not_block_an_export(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = Overtaken(catalog, TABLE, target, "orders", KAFKA_COLUMNS.schema, "layout")
    payments = ledger(catalog, target, "payments")
    one.load(TOPIC_ID)
    payments.load(uuid.uuid4())
    one.overtaking = lambda: payments.commit([TileResult(Tile(0, 0, 3))])
    assert one.commit([written(one, target, tmp_path, Tile(0, 0, 9))])
    assert offsets(catalog) == list(range(10))
    known = offsets_of(catalog.load_table(TABLE))
    assert {topic: each["next"] for topic, each in known.items()} == {"orders": {"0": 10}, "payments": {"0": 4}}


def test_offsets_outlive_the_snapshots(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(catalog, target)
    one.load(TOPIC_ID)
    one.commit([written(one, target, tmp_path, Tile(0, 0, 9))])
    table = catalog.load_table(TABLE)
    exported = table.current_snapshot()
    assert exported is not None
    table.delete("offset = 3")
    table.maintenance.expire_snapshots().by_id(exported.snapshot_id).commit()
    assert ledger(catalog, target).load(TOPIC_ID).next_offsets == {0: 10}


def test_a_table_that_was_rolled_back_is_filled_again(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(catalog, target)
    one.load(TOPIC_ID)
    table = catalog.load_table(TABLE)
    table.append(pa.Table.from_pylist([{"offset": -1}], schema=KAFKA_COLUMNS.schema))
    before = table.current_snapshot()
    one.commit([written(one, target, tmp_path, Tile(0, 0, 4))])
    exported = catalog.load_table(TABLE).current_snapshot()
    one.commit([written(one, target, tmp_path, Tile(0, 5, 9))])
    for snapshot, next_offsets in ((exported, {0: 5}), (before, {})):
        assert snapshot is not None
        catalog.load_table(TABLE).manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
        assert ledger(catalog, target).load(TOPIC_ID).next_offsets == next_offsets


def test_another_topic_of_the_name_or_another_layout_is_refused(catalog: Catalog, target: ExportTarget) -> None:
    one = ledger(catalog, target)
    one.load(TOPIC_ID)
    assert one.commit([TileResult(Tile(0, 0, 9))]) == [TileResult(Tile(0, 0, 9))]
    assert ledger(catalog, target).load(TOPIC_ID).next_offsets == {0: 10}
    with pytest.raises(JobError, match=f"db.orders holds another topic orders, with the id {TOPIC_ID}"):
        ledger(catalog, target).load(uuid.uuid4())
    uncommitted = IcebergLedger(catalog, TABLE, target, "orders", KAFKA_COLUMNS.schema, "another layout")
    with pytest.raises(JobError, match=r"db\.orders was begun with other columns, another value schema"):
        uncommitted.load(TOPIC_ID)


def test_nothing_is_committed_whose_staged_file_is_gone(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    one = ledger(catalog, target)
    one.load(TOPIC_ID)
    result = written(one, target, tmp_path, Tile(0, 0, 9))
    discard(target, result.staged)
    with pytest.raises(JobError, match=r"the staged file for .* is gone: run the export again"):
        one.commit([result])
    assert ledger(catalog, target).load(TOPIC_ID).next_offsets == {}


def test_table_and_files_are_in_s3_and_reached_as_the_target_is(
    s3: VersityGateway, topic_name: str, tmp_path: Path
) -> None:
    """A store that was left with the end of a body now and then refused Arrow's next request: hence several commits."""
    worker().run(s3.create_bucket("lake"))
    where = TargetSettings(f"s3://lake/{topic_name}", {k: v for k, v in s3.settings("lake").items() if k != "bucket"})
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"{where.url}/warehouse"}
    one = ledger(open_catalog("lake", properties, where), open_target(where))
    one.load(TOPIC_ID)
    for first in range(0, 30, 10):
        assert one.commit([written(one, open_target(where), tmp_path, Tile(0, first, first + 9))])
    # Another run commits the next records first, and this one learns of it.
    catalog = open_catalog("lake", properties, where)
    other = ledger(catalog, open_target(where))
    other.load(TOPIC_ID)
    assert other.commit([written(other, open_target(where), tmp_path, Tile(0, 30, 39))])
    assert one.commit([written(one, open_target(where), tmp_path, Tile(0, 30, 39))]) is None
    assert offsets(catalog) == list(range(40))
    assert catalog.load_table(TABLE).metadata_location.startswith(f"{where.url}/warehouse/db/orders/metadata/")


def test_a_missing_store_or_catalog_is_reported_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the catalog nowhere: "):
        open_catalog("nowhere", {"type": "strange"}, TargetSettings("file:///x"))
    where = TargetSettings("s3://lake/x", {"endpoint.url": "http://127.0.0.1:1", "region": "us-east-1"})
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": where.url}
    one = ledger(open_catalog("lake", properties, where), open_target(TargetSettings((tmp_path / "lake").as_uri())))
    with pytest.raises(
        JobError, match=r"the table db\.orders: .*connect to server: .*--catalog-property and --to-setting"
    ):
        one.load(TOPIC_ID)


def test_typed_values_are_columns_of_the_table(catalog: Catalog, target: ExportTarget, tmp_path: Path) -> None:
    logical = {"at": "timestamp-millis", "local": "local-timestamp-micros", "took": "time-micros"}
    fields: list[dict[str, Any]] = [
        {"name": name, "type": {"type": "long", "logicalType": kind}} for name, kind in logical.items()
    ]
    fields += [
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "counts", "type": {"type": "map", "values": "int"}},
        {"name": "lines", "type": {"type": "array", "items": ["null", "float"]}},
        {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
    ]
    values = TypedValues("avro", json.dumps({"type": "record", "name": "Order", "fields": fields}))
    order = b"\x02\x04\x06" + b"\x04\x04\xe2" + b"\x02\x02a\x0e\x00" + b"\x02\x02\x00\x00\x80\x3f\x00" + b"\x00"
    plain = pa.RecordBatch.from_pylist(
        [{"value": value, "partition": 0, "offset": offset} for offset, value in enumerate([order, b"\xff"])],
        schema=KAFKA_COLUMNS.schema,
    )
    typed, dead_letters = values.typed(plain)
    assert dead_letters == 1
    one = IcebergLedger(catalog, TABLE, target, "orders", values.schema(KAFKA_COLUMNS.schema), "layout")
    one.load(TOPIC_ID)
    assert one.commit([staged(one, target, tmp_path, Tile(0, 0, 1), typed)])
    rows = catalog.load_table(TABLE).scan().to_arrow().to_pylist()
    assert [row["value"] for row in rows] == typed.column("value").to_pylist()
    assert rows[0]["value"]["price"] == Decimal("12.50")
    assert [row["dead_letter"] for row in rows] == typed.column("dead_letter").to_pylist()
