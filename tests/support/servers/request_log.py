"""Reads the brokers' own request logs, which are enabled for a while.

A broker logs a request after it has sent the answer, in the order of the connection. Therefore a line of a connection
implies that all earlier lines of that connection are there.
"""

from __future__ import annotations

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, KafkaAdminClient

from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TIMEOUT_S
from tiers.model.ids import TopicIdPartition

_LOGGER = "kafka.request.logger"
_COMPLETED = "Completed request:"


class FetchedFrom(NamedTuple):
    """A fetch by a client or a follower. `records_bytes` is the size of the records in the answer."""

    client_id: str
    offset: int
    records_bytes: int


class RequestLog:
    def __init__(self, outputs: Mapping[Path, int]) -> None:
        self._outputs = outputs

    def fetches(self, partition: TopicIdPartition) -> list[FetchedFrom]:
        """Returns the fetches of a partition that were answered since the log was enabled."""
        topic = urlsafe_b64encode(partition.topic_id.bytes).decode().rstrip("=")
        return [
            FetchedFrom(
                said["requestHeader"]["clientId"],
                asked["fetchOffset"],
                _records_bytes(said["response"], topic, partition.partition),
            )
            for said in self._said()
            if said["requestHeader"]["requestApiKeyName"] == "FETCH"
            for of_topic in said["request"]["topics"]
            if of_topic.get("topicId") == topic  # before version 13, Fetch names topics
            for asked in of_topic["partitions"]
            if asked["partition"] == partition.partition
        ]

    def fetches_until(self, partition: TopicIdPartition, last_offset: int) -> list[FetchedFrom]:
        """Waits for a fetch at `last_offset`, and returns the partition's fetches."""
        deadline = time.monotonic() + TIMEOUT_S
        while last_offset not in [one.offset for one in self.fetches(partition)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no fetch of {partition} came for offset {last_offset}")
            time.sleep(0.05)
        return self.fetches(partition)

    def _said(self) -> Iterator[Any]:
        for output, start in self._outputs.items():
            with output.open("rb") as written:
                written.seek(start)
                for line in written:
                    _, completed, said = line.decode(errors="replace").partition(_COMPLETED)
                    if completed and line.endswith(b"\n"):
                        found = json.loads(said)
                        if found["request"]:  # the log has no request that was in progress when it was enabled
                            yield found


def _records_bytes(response: Any, topic: str, partition: int) -> int:
    """Returns the size of a partition's records in an answer. An answer in a session may not name the partition."""
    return sum(
        answer["recordsSizeInBytes"]
        for answered in response["responses"]
        if answered["topicId"] == topic
        for answer in answered["partitions"]
        if answer["partitionIndex"] == partition
    )


@contextmanager
def request_log(kafka: KafkaCluster) -> Iterator[RequestLog]:
    """Enables the request logs of all brokers."""
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    try:
        _set_level(admin, kafka, AlterConfigOp.SET, "DEBUG")
        try:
            yield RequestLog({broker.output: broker.output.stat().st_size for broker in kafka.brokers.values()})
        finally:
            _set_level(admin, kafka, AlterConfigOp.DELETE, None)
    finally:
        admin.close()


def _set_level(admin: KafkaAdminClient, kafka: KafkaCluster, change: AlterConfigOp, level: str | None) -> None:
    logger = {_LOGGER: (change, level)}
    of = ConfigResourceType.BROKER_LOGGER
    admin.alter_configs([ConfigResource(of, str(node_id), logger) for node_id in kafka.brokers])
