"""The answers about offsets: ListOffsets, OffsetForLeaderEpoch, and DeleteRecords, which raises the log start.

ListOffsets looks up a timestamp record by record. By default a log has only the current leader epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import DeleteRecordsResponse
from kafka.protocol.consumer import ListOffsetsResponse, OffsetForLeaderEpochResponse

from protocol.records.record_batch import iterate_batches
from protocol.records.record_reader import read_records
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.fetch import THROTTLE_MS

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

_Listed = ListOffsetsResponse.ListOffsetsTopicResponse
_Epochs = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
_Trimmed = DeleteRecordsResponse.DeleteRecordsTopicResult


async def list_offsets(broker: ScriptedBroker, request: Any) -> Any:
    return ListOffsetsResponse(
        throttle_time_ms=0,
        topics=[
            _Listed(name=topic.name, partitions=[_find(broker, topic.name, asked) for asked in topic.partitions])
            for topic in request.topics
        ],
    )


def _find(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    log = broker.logs[topic, asked.partition_index]
    timestamp, offset = _look_up(log, asked.timestamp)
    epoch = -1 if offset < 0 else log.leader_epoch
    return _Listed.ListOffsetsPartitionResponse(
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


def throttled(response: Any) -> None:
    response.throttle_time_ms = THROTTLE_MS


async def offset_for_leader_epoch(broker: ScriptedBroker, request: Any) -> Any:
    return OffsetForLeaderEpochResponse(
        throttle_time_ms=0,
        topics=[
            _Epochs(
                topic=topic.topic, partitions=[_end_of_epoch(broker, topic.topic, asked) for asked in topic.partitions]
            )
            for topic in request.topics
        ],
    )


def _end_of_epoch(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    end = broker.logs[topic, asked.partition].end_offset_for_epoch(asked.leader_epoch)
    return _Epochs.EpochEndOffset(
        error_code=0, partition=asked.partition, leader_epoch=end.leader_epoch, end_offset=end.end_offset
    )


async def delete_records(broker: ScriptedBroker, request: Any) -> Any:
    return DeleteRecordsResponse(
        throttle_time_ms=0,
        topics=[
            _Trimmed(name=topic.name, partitions=[_delete(broker, topic.name, asked) for asked in topic.partitions])
            for topic in request.topics
        ],
    )


def _delete(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    log = broker.logs[topic, asked.partition_index]
    wanted = log.high_watermark if asked.offset == -1 else asked.offset
    if not 0 <= wanted <= log.high_watermark:
        return _Trimmed.DeleteRecordsPartitionResult(
            partition_index=asked.partition_index, low_watermark=-1, error_code=1
        )
    log.log_start_offset = max(log.log_start_offset, wanted)
    return _Trimmed.DeleteRecordsPartitionResult(
        partition_index=asked.partition_index, low_watermark=log.log_start_offset, error_code=0
    )


def with_error(error_code: int, partition: int = 0) -> Callable[[Any], None]:
    """Sets an error in one partition of every topic, and no offset there."""

    def edit(response: Any) -> None:
        for topic in response.topics:
            for one in topic.partitions:
                if partition == (one.partition if hasattr(one, "partition") else one.partition_index):
                    one.error_code = error_code
                    for name in ("timestamp", "offset", "leader_epoch", "end_offset", "low_watermark"):
                        if hasattr(one, name):
                            setattr(one, name, -1)

    return edit
