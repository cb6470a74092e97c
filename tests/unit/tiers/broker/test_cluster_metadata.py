from __future__ import annotations

from uuid import UUID

from kafka.protocol.metadata import MetadataResponse

from protocol.errors import ErrorCode
from tiers.broker.cluster_metadata import ClusterMetadata, PartitionMetadata, TopicMetadata, from_response
from tiers.model.ids import TopicIdPartition


def test_a_topic_that_the_broker_does_not_know_has_no_id() -> None:
    unknown = MetadataResponse.MetadataResponseTopic(
        error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name="gone", topic_id=None, is_internal=False, partitions=[]
    )
    response = MetadataResponse(
        throttle_time_ms=0, brokers=[], cluster_id="c", controller_id=1, topics=[unknown], version=12
    )
    found = from_response(response, 0)
    assert found.topics["gone"].error == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert found.topics_by_id == {}


def of_topic(topic_id: int, *leader_epochs: int) -> ClusterMetadata:
    parts = {index: PartitionMetadata(index, 1, epoch, (1,), (1,)) for index, epoch in enumerate(leader_epochs)}
    topic = TopicMetadata("orders", UUID(int=topic_id), parts)
    return ClusterMetadata("c", 1, {}, {"orders": topic}, 0, {topic.topic_id: topic})


def test_a_broker_that_lags_behind_takes_nothing_back() -> None:
    known = of_topic(7, 4, 2, 1)
    found = of_topic(7, 3, 5).not_older_than(known)
    epochs = {index: one.leader_epoch for index, one in found.topics["orders"].partitions.items()}
    assert epochs == {0: 4, 1: 5, 2: 1}
    assert found.partition(TopicIdPartition(UUID(int=7), 2, "orders")) is not None
    made_again = of_topic(8, 0).not_older_than(known)
    assert list(made_again.topics["orders"].partitions) == [0]
