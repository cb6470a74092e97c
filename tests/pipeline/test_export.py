"""Exports of a real topic have every committed record of both tiers once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from pipeline import cli
from pipeline.config import load_pipeline_config
from pipeline.export.iceberg import OFFSETS, PLAN_ID, offsets_of
from pipeline.export.job import ExportRequest, ExportResult, IcebergTable, export_by
from pipeline.export.ledger import PLANS, TileResult
from pipeline.export.plan import PlannedTile
from pipeline.export.target import target_settings
from tests.support.pipeline.read_stage import ReadStage, Row, without_headers
from tests.support.servers.producing import create_topic, produce
from tiers.upkeep.runner import JobError

pytestmark = pytest.mark.integration


TABLE = "db.orders"


def to_files(stage: ReadStage, home: Path) -> ExportRequest:
    """A request with small files, a few per wave."""
    target = target_settings(str(home / "lake"), load_pipeline_config(stage.proxy.config), {})
    return ExportRequest(stage.topic, target, file_bytes=150_000, wave_files=3)


def to_table(stage: ReadStage, home: Path) -> ExportRequest:
    (home / "warehouse").mkdir()
    properties = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": (home / "warehouse").as_uri()}
    return replace(to_files(stage, home), iceberg=IcebergTable("lake", TABLE, properties))


def here(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    """Without Spark, in this process."""
    return [task(one) for one in plan]


def run(stage: ReadStage, request: ExportRequest) -> ExportResult:
    return export_by(here, load_pipeline_config(stage.proxy.config), request)


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def file_rows(home: Path) -> list[Row]:
    files = [path for path in (home / "lake").rglob("*.parquet") if PLANS not in path.parts]
    return sorted_rows([row for path in files for row in pq.ParquetFile(path).read().to_pylist()])


def table_of(request: ExportRequest) -> Any:
    assert request.iceberg is not None
    return load_catalog(request.iceberg.catalog, **request.iceberg.properties).load_table(TABLE)


def table_rows(request: ExportRequest) -> list[Row]:
    return sorted_rows(table_of(request).scan().to_arrow().to_pylist())


def expected(stage: ReadStage) -> list[Row]:
    return without_headers(stage.expected(is_committed_only=True))


def test_files_have_every_committed_record_of_both_tiers_once(stage: ReadStage, tmp_path: Path) -> None:
    request = replace(to_files(stage, tmp_path), include_headers=True)
    result = run(stage, request)
    assert file_rows(tmp_path) == stage.expected(is_committed_only=True)
    assert result.records == len(stage.expected(is_committed_only=True))
    assert not result.has_findings
    before = set((tmp_path / "lake").rglob("*.parquet"))
    assert len(before) > 6
    assert all(path.parent.parent.name == str(result.topic_id) for path in before)
    assert {pq.read_schema(path).remove_metadata() == request.schema for path in before} == {True}

    stage.produce(30)
    again = run(stage, request)
    assert again.records == 30
    assert file_rows(tmp_path) == stage.expected(is_committed_only=True)
    assert len(set((tmp_path / "lake").rglob("*.parquet")) - before) == 1
    assert run(stage, request).records == 0

    with pytest.raises(JobError, match="other columns, another value schema or another isol"):
        run(stage, replace(request, is_committed_only=False))


def test_a_table_has_them_too_and_says_how_far_it_has_come(stage: ReadStage, tmp_path: Path) -> None:
    request = to_table(stage, tmp_path)
    result = run(stage, request)
    assert table_rows(request) == expected(stage)
    table = table_of(request)
    ends = {str(one.partition): (one.end_offset or 0) + 1 for one in result.partitions}
    said = offsets_of(table)[stage.topic]
    assert (said["topicId"], said["next"]) == (str(result.topic_id), ends)
    assert said["leaderEpochs"].keys() == ends.keys()
    commits = [snapshot.summary.additional_properties for snapshot in table.snapshots()]
    assert len(commits) == -(-sum(one.files for one in result.partitions) // request.wave_files)
    assert len({commit[PLAN_ID] for commit in commits}) == 1
    assert json.loads(commits[-1][OFFSETS]) == offsets_of(table)

    # Commits of others have no offsets; the next run looks at earlier commits.
    row = {"topic": "others", "partition": 0, "offset": -1}
    table.append(pa.Table.from_pylist([row], schema=table.schema().as_arrow()))
    stage.produce(20, partition=1)
    assert run(stage, request).records == 20
    assert [row for row in table_rows(request) if row["topic"] != "others"] == expected(stage)


def test_spark_exports_typed_values_and_keeps_what_does_not_fit(
    stage: ReadStage, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = f"{stage.topic}-json"
    create_topic(stage.kafka.bootstrap_servers, topic)
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    (tmp_path / "order.json").write_text(json.dumps(schema))
    good = [b'{"id": %d}' % number for number in range(50)]
    produce(stage.kafka.bootstrap_servers, topic, [*good, b'{"id": "x"}', b"\xff"])
    arguments = ["export", "--config", str(stage.proxy.config), "--topic", topic, "--to", str(tmp_path / "lake")]
    arguments += ["--value-schema", f"json:{tmp_path / 'order.json'}"]
    assert cli.run([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(one["records"], one["dead_letters"]) for one in answer["partitions"]] == [(52, 2)]
    rows = file_rows(tmp_path)
    assert [row["value"] for row in rows] == [*({"id": number} for number in range(50)), None, None]
    letters = [row["dead_letter"] for row in rows]
    assert letters[:50] == [None] * 50
    assert [letter["value"] for letter in letters[50:]] == [b'{"id": "x"}', b"\xff"]
    assert letters[50]["error"] == 'id: expected an integer of 64 bits, found "x"'
    # Spark's own reader reads the same rows.
    files = spark.read.option("recursiveFileLookup", "true").parquet(str(tmp_path / "lake"))
    assert files.where("dead_letter is null").count() == 50
