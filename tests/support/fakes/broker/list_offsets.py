"""ListOffsets: the ends of the broker's logs. It looks up a timestamp record by record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer import ListOffsetsRequest, ListOffsetsResponse

from protocol.records.record_batch import iterate_batches
from protocol.records.record_reader import read_records
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.fetch import THROTTLE_MS

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = ListOffsetsRequest
_Topic = ListOffsetsResponse.ListOffsetsTopicResponse
_Partition = _Topic.ListOffsetsPartitionResponse


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return ListOffsetsResponse(
        throttle_time_ms=0,
        topics=[
            _Topic(name=topic.name, partitions=[_find(broker, topic.name, asked) for asked in topic.partitions])
            for topic in request.topics
        ],
    )


def _find(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    log = broker.logs[topic, asked.partition_index]
    timestamp, offset = _look_up(log, asked.timestamp)
    epoch = -1 if offset < 0 else log.leader_epoch
    return _Partition(
        partition_index=asked.partition_index, error_code=0, timestamp=timestamp, offset=offset, leader_epoch=epoch
    )


def _look_up(log: LocalLog, timestamp: int) -> tuple[int, int]:
    if timestamp in (-1, -2, -4):
        return -1, log.high_watermark if timestamp == -1 else log.log_start_offset
    if timestamp in (-5, -6):
        return -1, -1
    records = [
        (record.timestamp, record.offset)
        for raw in log.batches
        for batch in iterate_batches(raw)
        for record in read_records(raw, batch)
        if record.offset >= log.log_start_offset
    ]
    if timestamp == -3:
        return max(records, key=lambda record: (record[0], -record[1]), default=(-1, -1))
    return next((record for record in records if record[0] >= timestamp), (-1, -1))


def with_error(error_code: int, partition: int = 0) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        for topic in response.topics:
            for one in topic.partitions:
                if one.partition_index == partition:
                    one.error_code, one.timestamp, one.offset, one.leader_epoch = error_code, -1, -1, -1

    return edit


def throttled(response: Any) -> None:
    response.throttle_time_ms = THROTTLE_MS
