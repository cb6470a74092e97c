"""DescribeLogDirs of a simulated broker."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.broker.describe_log_dirs import refused, response
from tests.support.simulation.cluster import SimBroker, SimCluster


def log_dirs(cluster: SimCluster, broker: SimBroker, request: Any) -> Any:
    if cluster.hides_sizes:
        return refused()
    assert request.topics is None, "the client asks for all logs"
    return response(
        {
            (name, each.index): each.replicas[broker.node_id].size_bytes
            for name, topic in cluster.topics_seen_by(broker).items()
            for each in topic.partitions
        }
    )
