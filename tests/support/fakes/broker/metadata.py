"""Metadata: all brokers and topics that the test set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kafka.protocol.metadata import MetadataResponse

from protocol.errors import ErrorCode
from tiers.broker.cluster_metadata import TopicMetadata

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

_Topic = MetadataResponse.MetadataResponseTopic
_Broker = MetadataResponse.MetadataResponseBroker


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return MetadataResponse(
        throttle_time_ms=0,
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[_Broker(node_id=one.node_id, host="127.0.0.1", port=one.port, rack=None) for one in broker.brokers],
        topics=[
            _Topic(
                error_code=topic.error,
                name=topic.name,
                topic_id=topic.topic_id,
                is_internal=topic.is_internal,
                partitions=[
                    _Topic.MetadataResponsePartition(
                        error_code=p.error,
                        partition_index=p.index,
                        leader_id=p.leader_id,
                        leader_epoch=p.leader_epoch,
                        replica_nodes=[p.leader_id],
                        isr_nodes=[p.leader_id],
                        offline_replicas=[],
                    )
                    for p in topic.partitions.values()
                ],
            )
            for topic in _asked_for(broker, request)
        ],
    )


def _asked_for(broker: ScriptedBroker, request: Any) -> list[TopicMetadata]:
    if request.topics is None:
        return broker.topics
    found = []
    for asked in request.topics:
        is_named = asked.name is not None
        topic = next(
            (
                each
                for each in broker.topics
                if (each.name if is_named else each.topic_id) == (asked.name or asked.topic_id)
            ),
            None,
        )
        if topic is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_named else ErrorCode.UNKNOWN_TOPIC_ID
            topic = TopicMetadata(asked.name, UUID(int=0) if is_named else asked.topic_id, {}, error=code)
        found.append(topic)
    return found


def without_brokers(response: Any) -> None:
    response.brokers = []


def with_node(node_id: int, host: str, port: int) -> Callable[[Any], None]:
    """Adds a broker to those that the cluster names."""

    def edit(response: Any) -> None:
        response.brokers.append(_Broker(node_id=node_id, host=host, port=port, rack=None))

    return edit


def led_by(node_id: int) -> Callable[[Any], None]:
    """Makes a node the leader of every partition. The node need not be in the list of brokers."""

    def edit(response: Any) -> None:
        for topic in response.topics:
            for partition in topic.partitions:
                partition.leader_id = node_id

    return edit
