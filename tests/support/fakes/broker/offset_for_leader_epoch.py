"""OffsetForLeaderEpoch: the leader epochs of the broker's logs. By default a log has only the current epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = OffsetForLeaderEpochRequest
_Topic = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return OffsetForLeaderEpochResponse(
        throttle_time_ms=0,
        topics=[
            _Topic(topic=topic.topic, partitions=[_find(broker, topic.topic, asked) for asked in topic.partitions])
            for topic in request.topics
        ],
    )


def _find(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    end = broker.logs[topic, asked.partition].end_offset_for_epoch(asked.leader_epoch)
    return _Topic.EpochEndOffset(
        error_code=0, partition=asked.partition, leader_epoch=end.leader_epoch, end_offset=end.end_offset
    )


def with_error(error_code: int, partition: int = 0) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        for topic in response.topics:
            for one in topic.partitions:
                if one.partition == partition:
                    one.error_code, one.leader_epoch, one.end_offset = error_code, -1, -1

    return edit
