"""DescribeLogDirs of a simulated broker."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.broker.describe_log_dirs import refused, response
from tests.support.simulation.cluster import SimBroker, SimCluster


def log_dirs(cluster: SimCluster, broker: SimBroker, request: Any) -> Any:
    if cluster.hides_sizes:
        return refused()
    topics = cluster.topics_seen_by(broker)
    partitions = [
        (asked.topic, topics[asked.topic].partitions[index])
        for asked in request.topics
        for index in asked.partitions
        if asked.topic in topics and index < len(topics[asked.topic].partitions)
    ]
    return response({(name, one.index): one.replicas[broker.node_id].size_bytes for name, one in partitions})
