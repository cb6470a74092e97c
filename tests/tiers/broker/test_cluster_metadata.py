from __future__ import annotations

from kafka.protocol.metadata import MetadataResponse

from protocol.errors import ErrorCode
from tiers.broker.cluster_metadata import from_response


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
