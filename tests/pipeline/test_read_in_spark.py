"""Reads in a Spark session: SQL over both tiers, pushed filters, schemas, and streams that restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

import tidegate
from pipeline.source.datasource import register_data_sources
from tests.support.pipeline.read_stage import ReadStage, without_headers
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.servers.producing import TIMEOUT_S, add_partitions, create_topic

pytestmark = pytest.mark.integration

Found = tuple[int, int, bytes | None]
"""Partition, offset, value."""


def data_of(stage: ReadStage, spark: SparkSession, **options: str) -> DataFrame:
    register_data_sources(spark)
    return spark.read.format("kafka_tiered").options(**stage.options, **options).load()


def values(frame: DataFrame) -> list[Found]:
    return sorted((row["partition"], row["offset"], row["value"] and bytes(row["value"])) for row in frame.collect())


def expected(stage: ReadStage) -> list[Found]:
    return [(row["partition"], row["offset"], row["value"]) for row in stage.expected()]


SECRET = "swordfish"
SECRETS = {
    # The options have no effect on brokers without SASL, but Spark gets them.
    "kafka.sasl.jaas.config": f'PlainLoginModule required username="u" password="{SECRET}";',
    "kafka.ssl.key.password": SECRET,
}


def until_it_ends(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Spark gives the process of a stream's source ten seconds to start and connect, whatever else the machine has to
    do. A query that ends by that has read nothing, and is started again."""
    for is_last in (False, False, True):
        query = start()
        try:
            assert query.awaitTermination(int(TIMEOUT_S))
        except StreamingQueryException as error:
            if is_last or "Python worker failed to connect back" not in str(error):
                raise
        else:
            break
    return query


def test_a_frame_is_what_was_produced(spark: SparkSession, stage: ReadStage) -> None:
    frame = data_of(stage, spark, includeHeaders="true", splitBytes="200000").orderBy("partition", "offset")
    headers = StructField(
        "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
    )
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert frame.schema["headers"] == headers
    assert without_headers(frame.toArrow().to_pylist()) == without_headers(stage.expected())
    assert [row.headers for row in frame.select("headers").collect() if row.headers] == [
        [(each["key"], None if each["value"] is None else bytearray(each["value"])) for each in row["headers"]]
        for row in stage.expected()
        if row["headers"]
    ]


def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, stage: ReadStage, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = data_of(stage, spark)
    queries: list[tuple[str, Callable[[Found], bool]]] = [
        ("offset >= 100 and offset < 300 and partition = 0", lambda row: row[0] == 0 and 100 <= row[1] < 300),
        ("offset = 5 or value is null", lambda row: row[1] == 5 or row[2] is None),
        ("partition in (1, 7) and offset is not null", lambda row: row[0] == 1),
        ("topic = 'another'", lambda row: False),
    ]
    for condition, wanted in queries:
        expected_rows = [row for row in expected(stage) if wanted(row)]
        assert values(data_of(stage, spark, pushdown="true").where(condition)) == expected_rows
        # One frame for many queries: what one of them filters, the next one must not miss.
        assert values(whole.where(condition)) == expected_rows
    late = stage.expected(partition=0)[1500]["timestamp"]
    by_time = data_of(stage, spark, pushdown="true").where(col("timestamp") >= late)
    assert by_time.count() == len([row for row in stage.expected() if row["timestamp"] >= late])
    # Spark does not evaluate an exactly pushed filter again. The plan shows no secret.
    given = {**SECRETS, "kafka.bootstrap.servers": stage.kafka.bootstrap_servers, "pushdown": "true"}
    data_of(stage, spark, **given).where(queries[0][0]).explain("extended")
    explained = capsys.readouterr().out
    assert "kafka_tiered" in explained
    assert ") Filter " not in explained.partition("== Physical Plan ==")[2]
    assert SECRET not in explained
    by_time.explain()
    assert ") Filter " in capsys.readouterr().out


def test_a_session_that_pushes_nothing_down_reads_all_the_same(spark: SparkSession, stage: ReadStage) -> None:
    other = spark.newSession()
    other.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    assert data_of(stage, other).where("offset < 10 and partition = 1").count() == 10
    with pytest.raises(AnalysisException, match="PUSHDOWN_DISABLED"):
        data_of(stage, other, pushdown="true").where("offset < 10").count()


def test_a_stream_reads_both_tiers_once_over_restarts(spark: SparkSession, stage: ReadStage, tmp_path: Path) -> None:
    topic = f"{stage.topic}-stream"
    create_topic(stage.kafka.bootstrap_servers, topic, config={"retention.ms": "-1"})
    stage.produce(1200, topic=topic)
    until_trimmed(stage.kafka, topic, 300)
    stage.produce(50, topic=topic)
    seen: list[Found] = []
    batches: list[int] = []

    def keep(frame: DataFrame, number: int) -> None:
        rows = values(frame)
        seen.extend(rows)
        batches.append(len(rows))

    def start() -> StreamingQuery:
        options = {
            "config": stage.options["config"],
            "kafka.bootstrap.servers": stage.kafka.bootstrap_servers,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "500",
        }
        stream = tidegate.read(spark, topic, stream=True, **options, **SECRETS)
        return (
            stream.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    def produced() -> list[Found]:
        mine = [row for row in stage.rows if row["topic"] == topic]
        return sorted((row["partition"], row["offset"], row["value"]) for row in mine)

    first = until_it_ends(start)
    assert batches == [500, 500, 250]
    assert sorted(seen) == produced()
    until_it_ends(start)
    assert len(batches) == 3
    add_partitions(stage.kafka.bootstrap_servers, topic, 2)
    stage.produce(20, topic=topic)
    stage.produce(30, topic=topic, partition=1)
    until_it_ends(start)
    assert sorted(seen) == produced()
    assert sum(batches[3:]) == 50
    told = [progress.json for progress in first.recentProgress]
    told += [file.read_text(errors="replace") for file in (tmp_path / "checkpoint").rglob("*") if file.is_file()]
    assert any(topic in text for text in told)
    assert not any(SECRET in text for text in told)
