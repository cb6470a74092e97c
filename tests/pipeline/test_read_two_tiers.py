"""The data source reads a real topic of both tiers, planned and read without Spark."""

from __future__ import annotations

import json

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from pipeline.source.columns import spark_schema
from pipeline.source.options import OptionError, parse_options
from pipeline.source.read_plan import LocalRange, RemoteRange
from pipeline.source.stream import TieredStreamReader
from pipeline.source.tiered_log import DataLossError
from pipeline.worker import CLIENT_ID
from tests.support.pipeline.read_stage import (
    ReadStage,
    Row,
    reader_of,
    rows_of,
    tasks_of,
    without_headers,
)
from tests.support.rigs.strict_consumer import local_log_start
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values
from tests.support.servers.request_log import request_log
from tiers.errors import BrokerError

pytestmark = pytest.mark.integration

BEYOND_ALL = 1 << 62


def test_all_records_come_once_across_the_seam(stage: ReadStage) -> None:
    reader, _ = reader_of(stage.options)
    ranges = [one for task in tasks_of(reader) for one in task.ranges]
    remote = [one for one in ranges if isinstance(one, RemoteRange)]
    local = [one for one in ranges if isinstance(one, LocalRange)]
    assert len(remote) > 5
    assert [one.partition.partition for one in local] == [0, 1]
    assert local[0].first_offset == remote[-1].end_offset + 1
    rows = rows_of({**stage.options, "includeHeaders": "true"})
    assert rows == stage.expected()
    assert rows_of(stage.options) == without_headers(rows)
    options = {**stage.options, "kafka.isolation.level": "read_committed"}
    assert rows_of(options) == without_headers(stage.expected(is_committed_only=True))
    schema = StructType([StructField("offset", LongType()), StructField("value", BinaryType())])
    assert [list(row.items()) for row in rows_of(stage.options, schema)] == [
        [("offset", row["offset"]), ("value", row["value"])] for row in rows
    ]


def test_through_the_proxy_it_is_the_same(stage: ReadStage) -> None:
    options = {"kafka.bootstrap.servers": stage.proxy.bootstrap_servers, "subscribe": stage.topic}
    reader, _ = reader_of(options)
    assert all(isinstance(one, LocalRange) for task in tasks_of(reader) for one in task.ranges)
    assert rows_of({**options, "includeHeaders": "true"}) == stage.expected()
    options["kafka.isolation.level"] = "read_committed"
    assert rows_of(options) == without_headers(stage.expected(is_committed_only=True))


def test_the_brokers_send_nothing_of_what_is_remote(stage: ReadStage) -> None:
    """The bounds as the leader says them. A Fetch beyond all offsets asks for them too."""
    topic, expected = stage.topic, without_headers(stage.expected(partition=0))
    assigned = {"config": stage.options["config"], "assign": f'{{"{topic}":[0]}}'}
    *remote, local = [one for task in tasks_of(reader_of(assigned)[0]) for one in task.ranges]
    assert all(isinstance(one, RemoteRange) for one in remote)
    local_start = local_log_start(stage.kafka, topic)
    assert remote[0].end_offset < local_start < local.first_offset == remote[-1].end_offset + 1

    def read(first: int, end: int) -> int:
        bounds = {"startingOffsets": f'{{"{topic}":{{"0":{first}}}}}', "endingOffsets": f'{{"{topic}":{{"0":{end}}}}}'}
        rows = rows_of({**assigned, **bounds})
        assert rows == [row for row in expected if first <= row["offset"] < end]
        return len(rows)

    with request_log(stage.kafka) as log:
        assert read(0, local.first_offset) > 1500
        assert read(local.first_offset - 100, local.end_offset) > 40
        read(local.end_offset, local.end_offset + 1)
        fetches = log.fetches_until(local.partition, local.end_offset)
    assert [one for one in fetches if one.offset < local_start] == []
    ours = [one for one in fetches if one.client_id == CLIENT_ID]
    assert sum(one.records_bytes for one in ours if one.offset >= BEYOND_ALL) == 0
    asked = [one.offset for one in ours if one.offset < BEYOND_ALL]
    assert (asked[0], asked[-1]) == (local.first_offset, local.end_offset)
    assert asked == sorted(asked)


def test_offsets_may_be_given(stage: ReadStage) -> None:
    topic = stage.topic
    options = {
        **stage.options,
        "startingOffsets": f'{{"{topic}":{{"0":150,"1":-2}}}}',
        "endingOffsets": f'{{"{topic}":{{"0":160,"1":10}}}}',
    }
    rows = rows_of(options)
    assert [(row["partition"], row["offset"]) for row in rows] == [
        *((0, offset) for offset in range(150, 160)),
        *((1, offset) for offset in range(10)),
    ]
    with pytest.raises(OptionError, match="you must specify all TopicPartitions"):
        rows_of({**options, "startingOffsets": f'{{"{topic}":{{"0":150}}}}'})
    with pytest.raises(DataLossError, match="ends at"):
        rows_of({**options, "endingOffsets": f'{{"{topic}":{{"0":1000000,"1":10}}}}'})
    with pytest.raises(OptionError, match="there is no topic no-such"):
        rows_of({**stage.options, "subscribe": "no-such"})


def test_times_are_looked_up_in_both_tiers(stage: ReadStage) -> None:
    remote, local = stage.expected(partition=0)[250], stage.expected(partition=1)[50]
    times = {"0": remote["timestamp"], "1": local["timestamp"]}
    by_partition = json.dumps({stage.topic: {number: int(at.timestamp() * 1000) for number, at in times.items()}})

    def is_later(row: Row) -> bool:
        return bool(row["timestamp"] >= times[str(row["partition"])])

    later = [row for row in stage.expected() if is_later(row)]
    assert rows_of({**stage.options, "startingOffsetsByTimestamp": by_partition}) == without_headers(later)
    earlier = [row for row in stage.expected() if not is_later(row)]
    assert rows_of({**stage.options, "endingOffsetsByTimestamp": by_partition}) == without_headers(earlier)
    never = {"startingTimestamp": str(2**42)}
    with pytest.raises(OptionError, match="No offset matched"):
        rows_of({**stage.options, **never})
    assert rows_of({**stage.options, **never, "startingOffsetsByTimestampStrategy": "latest"}) == []
    assert rows_of({**stage.options, "endingTimestamp": str(2**42)}) == without_headers(stage.expected())


def test_a_topic_made_again_is_never_read_in_the_place_of_the_old_one(stage: ReadStage) -> None:
    topic, servers = f"{stage.topic}-again", stage.kafka.bootstrap_servers
    options = {"config": stage.options["config"], "subscribe": topic, "startingOffsets": "earliest"}

    def stream(**more: str) -> TieredStreamReader:
        return TieredStreamReader(parse_options({**options, **more}, is_streaming=True), spark_schema(["value"]))

    create_topic(servers, topic)
    produce(servers, topic, random_values(30))
    reader, _ = reader_of(options)
    planned = tasks_of(reader)
    running = stream()
    read = running.latestOffset(running.initialOffset(), ReadAllAvailable())
    delete_topic(servers, topic)
    again = random_values(50)
    create_topic(servers, topic)
    produce(servers, topic, again)
    with pytest.raises(BrokerError, match="with its topic id"):
        list(reader.read(planned[0]))
    end = running.latestOffset(read, ReadAllAvailable())
    with pytest.raises(DataLossError, match=f"{topic}: deleted and made again"):
        running.partitions(read, end)
    restarted = stream(failOnDataLoss="false")
    values = [
        row for task in restarted.partitions(read, end) for batch in restarted.read(task) for row in batch.column(0)
    ]
    assert [value.as_py() for value in values] == again
    running.stop()
    restarted.stop()
