"""DeleteRecords: raises the log start of the broker's own log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import DeleteRecordsRequest, DeleteRecordsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = DeleteRecordsRequest
_Topic = DeleteRecordsResponse.DeleteRecordsTopicResult


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return DeleteRecordsResponse(
        throttle_time_ms=0,
        topics=[
            _Topic(name=topic.name, partitions=[_delete(broker, topic.name, asked) for asked in topic.partitions])
            for topic in request.topics
        ],
    )


def _delete(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    log = broker.logs[topic, asked.partition_index]
    wanted = log.high_watermark if asked.offset == -1 else asked.offset
    if not 0 <= wanted <= log.high_watermark:
        return _Topic.DeleteRecordsPartitionResult(
            partition_index=asked.partition_index, low_watermark=-1, error_code=1
        )
    log.log_start_offset = max(log.log_start_offset, wanted)
    return _Topic.DeleteRecordsPartitionResult(
        partition_index=asked.partition_index, low_watermark=log.log_start_offset, error_code=0
    )


def with_error(error_code: int, partition: int = 0) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        for topic in response.topics:
            for one in topic.partitions:
                if one.partition_index == partition:
                    one.error_code, one.low_watermark = error_code, -1

    return edit
