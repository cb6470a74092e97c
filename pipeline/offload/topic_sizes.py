"""What the logs of partitions take on their brokers' disks (DescribeLogDirs): an estimate, for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka.protocol.admin import DescribeLogDirsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError

_TIMEOUT_MS = 30_000


async def log_sizes(
    client: BrokerClient, partitions: Mapping[int, Mapping[str, list[int]]]
) -> dict[tuple[str, int], int]:
    """By topic and partition, in bytes; `partitions` by broker and topic. A broker that does not tell is left out: who
    may not describe the cluster is told nothing."""
    sizes: dict[tuple[str, int], int] = {}
    for node_id, topics in partitions.items():
        asked = [
            DescribeLogDirsRequest.DescribableLogDirTopic(topic=name, partitions=numbers)
            for name, numbers in topics.items()
        ]
        try:
            answer: Any = await client.request(
                node_id, DescribeLogDirsRequest(topics=asked), _TIMEOUT_MS, min_version=1
            )
        except BrokerError:
            continue
        for folder in answer.results:
            if folder.error_code != ErrorCode.NONE:
                continue
            for topic in folder.topics:
                for one in topic.partitions:
                    if not one.is_future_key:
                        sizes[topic.name, one.partition_index] = one.partition_size
    return sizes
