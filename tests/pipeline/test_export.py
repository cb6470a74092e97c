"""Exports of a real topic have every record once, also when they are killed, interrupted, doubled or damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from pipeline import cli
from pipeline.chosen_partitions import NothingChosenError
from pipeline.export.iceberg import OFFSETS, PLAN_ID, offsets_of
from pipeline.export.job import ExportRequest, ExportResult, RunTasks, export_by
from pipeline.export.ledger import PLANS, TileResult
from pipeline.export.plan import PlannedTile
from pipeline.worker import worker
from tests.support.pipeline.export_requests import TABLE, config_of, to_files, to_table
from tests.support.pipeline.read_stage import ReadStage, Row, without_headers
from tests.support.servers.producing import create_topic, produce, topic_id_partition
from tiers.model.ids import TopicIdPartition
from tiers.upkeep.runner import JobError

pytestmark = pytest.mark.integration


def here(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    """Without Spark, in this process."""
    return [task(one) for one in plan]


def run(stage: ReadStage, request: ExportRequest, tasks: RunTasks = here) -> ExportResult:
    return export_by(tasks, config_of(stage), request)


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))


def file_rows(home: Path) -> list[Row]:
    files = [path for path in (home / "lake").rglob("*.parquet") if PLANS not in path.parts]
    return sorted_rows([row for path in files for row in pq.ParquetFile(path).read().to_pylist()])


def staged(home: Path) -> list[Path]:
    return [path for path in (home / "lake" / ".tmp").rglob("*") if path.is_file()]


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


def test_killed_between_files_or_before_the_commit_it_goes_on(stage: ReadStage, tmp_path: Path) -> None:
    script = [
        sys.executable,
        "-m",
        "tests.support.pipeline.killed_export",
        str(stage.proxy.config),
        stage.topic,
        str(tmp_path),
    ]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr

    request = to_table(stage, tmp_path / "table")
    written = {path.as_uri() for path in (tmp_path / "table").rglob("lake/**/*.parquet")}
    committed = {task.file.file_path for task in table_of(request).scan().plan_files()}
    assert len(committed) == request.wave_files
    # The files of the second wave are staged, and never count.
    assert len(staged(tmp_path / "table")) == request.wave_files
    assert committed == written - {path.as_uri() for path in staged(tmp_path / "table")}
    run(stage, request)
    assert table_rows(request) == expected(stage)

    files = {path: path.read_bytes() for path in (tmp_path / "files").rglob("*.parquet")}
    assert len(files) == request.wave_files
    assert len(staged(tmp_path / "files")) == 2
    other_tiles = replace(to_files(stage, tmp_path / "files"), file_bytes=400_000)
    run(stage, other_tiles)
    assert file_rows(tmp_path / "files") == expected(stage)
    assert {path: path.read_bytes() for path in files} == files
    assert staged(tmp_path / "files") == []


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", ["files", "table"])
@pytest.mark.parametrize("waves", [1, 100])
def test_two_concurrent_exports_have_each_record_once(stage: ReadStage, tmp_path: Path, kind: str, waves: int) -> None:
    """The other one comes between this one's files and its commit; it ends after so many waves."""
    request = to_table(stage, tmp_path) if kind == "table" else to_files(stage, tmp_path)
    other = replace(request, file_bytes=90_000, wave_files=5)
    ran: list[str] = []

    def limited(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        if ran.count("other") == waves:
            raise Interrupted
        ran.append("other")
        return here(what, plan, task)

    def interrupted(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        results = here(what, plan, task)
        ran.append("this")
        if ran.count("this") == 1:
            try:
                run(stage, other, limited)
            except Interrupted:
                assert waves == 1
        return results

    run(stage, request, interrupted)
    assert "other" in ran
    assert (table_rows(request) if kind == "table" else file_rows(tmp_path)) == expected(stage)


@contextmanager
def damaged(stage: ReadStage, number: int) -> Iterator[int]:
    """One byte of that segment of partition 0; gives the offset where its chunk begins."""

    async def find() -> TopicIdPartition:
        return await topic_id_partition(await worker().client(config_of(stage)), stage.topic)

    found = worker().run(find())
    path = sorted((stage.folder / "tier").rglob(f"{found.topic_id}/0/*.log"))[number]
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 0xFF]) + whole[-39:])
    try:
        yield int(path.name.split("-")[0])
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["files", "table"])
def test_a_damaged_batch_stops_its_partition_alone(stage: ReadStage, tmp_path: Path, kind: str) -> None:
    """A file has two segments here, so the promise of one is cut."""
    request = to_table(stage, tmp_path) if kind == "table" else to_files(stage, tmp_path)
    request = replace(request, file_bytes=250_000, wave_files=2)
    with damaged(stage, 3) as offset:
        first, second = run(stage, request).partitions
        again = run(stage, request)
    assert first.stopped_at == offset
    assert "is not what was stored" in first.reason
    assert (second.stopped_at, second.records) == (None, len([row for row in expected(stage) if row["partition"] == 1]))
    assert (again.has_findings, again.records) == (True, 0)
    rows = table_rows(request) if kind == "table" else file_rows(tmp_path)
    before = [row for row in expected(stage) if row["partition"] == 1 or row["offset"] < offset]
    assert rows == before
    assert rows[0]["offset"] == 0
    assert staged(tmp_path) == []

    assert not run(stage, request).has_findings
    assert (table_rows(request) if kind == "table" else file_rows(tmp_path)) == expected(stage)


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


def test_a_wrong_request_is_reported_in_a_line(
    stage: ReadStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = to_files(stage, tmp_path)
    with pytest.raises(NothingChosenError, match="there is no topic nobody"):
        run(stage, replace(request, topic="nobody"))
    common = ["export", "--config", str(stage.proxy.config), "--topic", stage.topic]
    for arguments, said in (
        (["--to", "ftp://x/y"], "expected a folder, s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH"),
        (["--to", "x", "--table", "db.t"], "--table: only with --format iceberg"),
        (["--to", "x", "--format", "iceberg"], "needs --catalog and --table"),
        (["--to", "x", "--value-schema", "xml:f"], "expected json:FILE or avro:FILE"),
        (["--to", "x", "--confluent-schema-id", "1"], "only with --value-schema"),
    ):
        assert cli.run([*common, *arguments]) in (2, 3)
        assert said in capsys.readouterr().err
