"""DescribeLogDirs of a simulated broker."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.broker.cluster_apis import log_dirs as found_log_dirs
from tests.support.fakes.broker.cluster_apis import no_log_dirs
from tests.support.simulation.cluster import SimBroker, SimCluster


def log_dirs(cluster: SimCluster, broker: SimBroker, request: Any) -> Any:
    if cluster.hides_sizes:
        return no_log_dirs()
    assert request.topics is None, "the client asks for all logs"
    return found_log_dirs(
        {
            (name, each.index): each.replicas[broker.node_id].size_bytes
            for name, topic in cluster.topics_seen_by(broker).items()
            for each in topic.partitions
        }
    )
