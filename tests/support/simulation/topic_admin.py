"""What a simulated broker answers to CreateTopics and DeleteTopics."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kafka.protocol.admin import CreateTopicsResponse, DeleteTopicsResponse

from protocol.errors import ErrorCode
from tests.support.simulation.cluster import SimBroker, SimCluster
from tests.support.simulation.compaction import DELETE_RETENTION_MS

TOPIC_DELETION_DISABLED = 73


def create_topics(cluster: SimCluster, broker: SimBroker, request: Any) -> Any:
    result = CreateTopicsResponse.CreatableTopicResult
    results = []
    for topic in request.topics:
        code = 0
        if topic.name in cluster.topics:
            code = ErrorCode.TOPIC_ALREADY_EXISTS
        elif not broker.is_cut_off:
            configs = {one.name: one.value for one in topic.configs}
            cluster.create_topic(
                topic.name, topic.num_partitions, {"delete.retention.ms": str(DELETE_RETENTION_MS), **configs}
            )
        else:
            code = ErrorCode.REQUEST_TIMED_OUT
        results.append(
            result(name=topic.name, topic_id=UUID(int=0), error_code=code, error_message=None, num_partitions=-1,
                   replication_factor=-1, configs=None)
        )  # fmt: skip
    return CreateTopicsResponse(throttle_time_ms=0, topics=results)


def delete_topics(cluster: SimCluster, request: Any) -> Any:
    result = DeleteTopicsResponse.DeletableTopicResult
    results = []
    for name in request.topic_names:
        code: int = ErrorCode.NONE
        topic = cluster.topics.get(name)
        if cluster.refuses_deletions:
            code = TOPIC_DELETION_DISABLED
        elif topic is None:
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        else:
            cluster.lose_topic(topic)
            cluster.on_topic_deleted(topic)
        results.append(result(name=name, error_code=code, error_message=None))
    return DeleteTopicsResponse(throttle_time_ms=0, responses=results)
