"""Produce: stores no records, and answers with the offset that they would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.producer import ProduceResponse

from tests.support.fakes.broker.fetch import THROTTLE_MS

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

_Topic = ProduceResponse.TopicProduceResponse
_Partition = _Topic.PartitionProduceResponse


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return ProduceResponse(
        throttle_time_ms=0,
        responses=[
            _Topic(
                name=topic.name,
                topic_id=topic.topic_id,
                partition_responses=[
                    _Partition(index=one.index, error_code=0, base_offset=0, record_errors=[], error_message=None)
                    for one in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ],
        node_endpoints=[],
    )


def led_by(node_id: int, host: str, port: int, error_code: int = 6) -> Callable[[Any], None]:
    """Sets NOT_LEADER_OR_FOLLOWER in every partition, and the leader's address in the response (KIP-951)."""

    def edit(response: Any) -> None:
        for topic in response.responses:
            for one in topic.partition_responses:
                one.error_code = error_code
                one.base_offset = -1
                one.current_leader = _Partition.LeaderIdAndEpoch(leader_id=node_id, leader_epoch=9)
        response.node_endpoints = [ProduceResponse.NodeEndpoint(node_id=node_id, host=host, port=port, rack="r")]

    return edit


def throttled(response: Any) -> None:
    response.throttle_time_ms = THROTTLE_MS
