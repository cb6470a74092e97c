"""The size of a micro-batch, and its partitions that appear and disappear."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from pipeline.source import stream
from pipeline.source.columns import spark_schema
from pipeline.source.options import LATEST, Position, ReadOptions, parse_options
from pipeline.source.read_plan import LogView, MissingOffsets, ReadRange, cover
from pipeline.source.read_task import ReadTask
from pipeline.source.stream import (
    Offsets,
    StreamOffsets,
    TieredStreamReader,
    decode_offsets,
    encode_offsets,
    rate_limit,
)
from pipeline.source.tiered_log import DataLossError, LogBounds
from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition

Encoded = dict[str, dict[str, int]]


class GrowingLog:
    """All local; `ends` are the partitions that there are, and where they end."""

    def __init__(self) -> None:
        self.ends = {0: 100}
        self.log_start = 0
        self.topic_id = TOPIC_ID
        self.opened = 0
        self.is_broken = False
        self.cluster_id = ""

    @asynccontextmanager
    async def open(self, options: ReadOptions) -> AsyncIterator[GrowingLog]:
        self.opened += 1
        self.is_broken = False
        yield self

    async def partitions(self) -> list[TopicIdPartition]:
        if self.is_broken:
            raise RemoteLogError("the connection is gone")
        return [TopicIdPartition(self.topic_id, number, "orders") for number in self.ends]

    async def bounds(self, partitions: list[TopicIdPartition]) -> dict[TopicIdPartition, LogBounds]:
        return {one: LogBounds(self.log_start, self.log_start, self.ends[one.partition]) for one in partitions}

    async def offsets(
        self, position: Position, bounds: dict[TopicIdPartition, LogBounds]
    ) -> dict[TopicIdPartition, int]:
        return {one: each.end if position.default == LATEST else each.log_start for one, each in bounds.items()}

    def ranges(
        self, partition: TopicIdPartition, bounds: LogBounds, first: int, last: int
    ) -> list[ReadRange | MissingOffsets]:
        return list(cover(LogView(partition, bounds.log_start, bounds.local_start, lambda at: ()), first, last))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> GrowingLog:
    growing = GrowingLog()
    monkeypatch.setattr(stream, "open_log", growing.open)
    return growing


class Clock:
    now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


CLOCK = Clock()


def reader(**options: str) -> TieredStreamReader:
    given_options = {"kafka.bootstrap.servers": "localhost:1", "subscribe": "orders", **options}
    return TieredStreamReader(parse_options(given_options, is_streaming=True), spark_schema(["offset"]), CLOCK)


def planned(of: TieredStreamReader, start: dict[int, int], end: dict[int, int]) -> list[tuple[int, int, int]]:
    return ranges_of(of, at(start), at(end))


def ranges_of(of: TieredStreamReader, start: Encoded, end: Encoded) -> list[tuple[int, int, int]]:
    tasks = of.partitions(start, end)
    ranges = [one for task in tasks if isinstance(task, ReadTask) for one in task.ranges]
    return [(one.partition.partition, one.first_offset, one.end_offset) for one in ranges]


def at(offsets: dict[int, int], topic_id: UUID = TOPIC_ID) -> Encoded:
    return encode_offsets(StreamOffsets({("orders", one): each for one, each in offsets.items()}, {"orders": topic_id}))


def test_a_batch_takes_what_there_is_or_as_much_as_it_may(log: GrowingLog) -> None:
    assert reader().initialOffset() == at({0: 100})
    assert reader(startingOffsets="earliest").initialOffset() == at({0: 0})
    limited = reader(maxOffsetsPerTrigger="30")
    limit = limited.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    assert limited.latestOffset(at({0: 0}), limit) == at({0: 30})
    assert limited.latestOffset(at({0: 90}), limit) == at({0: 100})
    assert limited.reportLatestOffset() == at({0: 100})
    assert reader().getDefaultReadLimit() == ReadAllAvailable()
    assert reader().latestOffset(at({0: 0}), ReadAllAvailable()) == at({0: 100})


def test_a_batch_waits_for_enough_but_not_for_ever(log: GrowingLog) -> None:
    patient = reader(minOffsetsPerTrigger="50", maxTriggerDelay="10s")
    assert patient.getDefaultReadLimit() == ReadMinRows(50)
    assert patient.latestOffset(at({0: 55}), ReadMinRows(50)) == at({0: 100})  # the first one, as in Spark
    assert patient.latestOffset(at({0: 60}), ReadMinRows(50)) == at({0: 60})
    assert patient.latestOffset(at({0: 40}), ReadMinRows(50)) == at({0: 100})
    CLOCK.now_ms += 10_000
    assert patient.latestOffset(at({0: 60}), ReadMinRows(50)) == at({0: 100})


def test_available_now_ends_where_it_was_when_it_began(log: GrowingLog) -> None:
    once = reader(maxOffsetsPerTrigger="60")
    once.prepareForTriggerAvailableNow()
    assert once.latestOffset(at({0: 0}), ReadMaxRows(60)) == at({0: 60})
    log.ends[0] = 500
    assert once.latestOffset(at({0: 60}), ReadMaxRows(60)) == at({0: 100})
    assert once.latestOffset(at({0: 100}), ReadMaxRows(60)) == at({0: 100})


def test_a_partition_that_appears_is_read_from_its_start(log: GrowingLog) -> None:
    running = reader()
    log.ends[1] = 20
    assert running.latestOffset(at({0: 90}), ReadAllAvailable()) == at({0: 100, 1: 20})
    assert planned(running, {0: 90}, {0: 100, 1: 20}) == [(0, 90, 99), (1, 0, 19)]
    log.log_start = 5
    with pytest.raises(DataLossError, match="Added partition orders-1 starts from 5 instead of 0"):
        planned(running, {0: 90}, {0: 100, 1: 20})
    assert planned(reader(failOnDataLoss="false"), {0: 90}, {0: 100, 1: 20}) == [(0, 90, 99), (1, 5, 19)]


def test_removed_records_are_a_loss(log: GrowingLog) -> None:
    with pytest.raises(DataLossError, match="orders-3 are gone"):
        planned(reader(), {0: 0, 3: 7}, {0: 10})
    with pytest.raises(DataLossError, match="orders-0 was to be read from 50 to 200, and ends at 100"):
        planned(reader(), {0: 50}, {0: 200})
    lenient = reader(failOnDataLoss="false")
    assert planned(lenient, {0: 0, 3: 7}, {0: 10}) == [(0, 0, 9)]
    assert planned(lenient, {0: 50}, {0: 200}) == [(0, 50, 99)]


def test_a_topic_that_was_made_again_is_another_one(log: GrowingLog, caplog: pytest.LogCaptureFixture) -> None:
    old, again = at({0: 60}), UUID(int=7)
    log.topic_id = again
    for options, limit, end in (
        ({}, ReadAllAvailable(), 100),  # longer than the old one was read
        ({"maxOffsetsPerTrigger": "60"}, ReadMaxRows(60), 60),  # read to the very offset
        ({"maxOffsetsPerTrigger": "20"}, ReadMaxRows(20), 20),
    ):
        until = reader(**options).latestOffset(old, limit)
        assert until == at({0: end}, again) != old
        with pytest.raises(DataLossError, match="orders: deleted and made again under the name"):
            reader(**options).partitions(old, until)
        caplog.clear()
        lenient = reader(**options, failOnDataLoss="false")
        assert ranges_of(lenient, old, until) == [(0, 0, end - 1)]
        assert "orders: deleted and made again" in caplog.text
        assert ranges_of(lenient, until, at({0: 100}, again)) == ([(0, end, 99)] if end < 100 else [])
    # Between the two calls of one batch, and while what was there at first is still being read.
    with pytest.raises(DataLossError, match="orders-0 are gone"):
        reader().partitions(old, at({0: 90}))
    assert ranges_of(reader(failOnDataLoss="false"), old, at({0: 90})) == []


def test_offsets_that_name_no_topic_id_are_of_any_topic(log: GrowingLog) -> None:
    kafka_sources = {"orders": {"0": 60}}
    assert reader().latestOffset(kafka_sources, ReadAllAvailable()) == at({0: 100})
    assert ranges_of(reader(), kafka_sources, at({0: 100})) == [(0, 60, 99)]
    given = parse_options(
        {"kafka.bootstrap.servers": "a:1", "subscribe": "orders", "startingOffsets": json.dumps(at({0: 60}))},
        is_streaming=True,
    )
    assert given.starting == Position(None, {("orders", 0): 60})


def test_a_log_that_fails_is_opened_anew(log: GrowingLog) -> None:
    running = reader()
    running.latestOffset(at({0: 0}), ReadAllAvailable())
    running.latestOffset(at({0: 0}), ReadAllAvailable())
    assert log.opened == 1
    log.is_broken = True
    assert running.latestOffset(at({0: 0}), ReadAllAvailable()) == at({0: 100})
    assert log.opened == 2
    running.stop()


names = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
offsets = st.dictionaries(names, st.integers(0, 1000), max_size=6)


@given(offsets, offsets, st.integers(1, 500))
def test_a_limit_starves_no_partition_and_is_about_kept(starts: Offsets, latest: Offsets, limit: int) -> None:
    ends = rate_limit(limit, starts, latest)
    assert ends.keys() == latest.keys()
    taken = 0
    for name, end in ends.items():
        if name in starts and latest[name] > starts[name]:
            assert starts[name] < end <= latest[name]
            taken += end - starts[name]
        else:
            assert end == latest[name]
    assert taken <= limit + len(ends)
    position = StreamOffsets(ends, {topic: UUID(int=limit) for topic, _ in ends})
    assert decode_offsets(json.loads(json.dumps(encode_offsets(position)))) == position
