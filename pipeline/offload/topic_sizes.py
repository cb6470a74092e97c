"""`log_sizes`: the sizes of logs on their brokers' disks (DescribeLogDirs), as an estimate for a plan."""

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
    """Returns bytes by topic and partition. `partitions` is by broker and topic. Brokers that do not answer are left
    out. The brokers also tell nothing to a client without the right to describe the cluster."""
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
