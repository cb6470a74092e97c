"""What the brokers say that clients asked them for: Kafka's own log of requests, turned on for a while.

A broker writes a request down once its answer has left, and in the order of the connection: who has seen a line of a
connection has all before it.
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

from tests.servers.kafka import KafkaCluster
from tests.servers.producing import TIMEOUT_S
from tiers.model.ids import TopicIdPartition

_LOGGER = "kafka.request.logger"
_COMPLETED = "Completed request:"


class FetchedFrom(NamedTuple):
    """By any client or follower; `records_bytes` is what it was sent."""

    client_id: str
    offset: int
    records_bytes: int


class RequestLog:
    def __init__(self, outputs: Mapping[Path, int]) -> None:
        self._outputs = outputs

    def fetches(self, partition: TopicIdPartition) -> list[FetchedFrom]:
        """Those that have been answered since."""
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
            if of_topic.get("topicId") == topic  # before Fetch v13 they have names
            for asked in of_topic["partitions"]
            if asked["partition"] == partition.partition
        ]

    def fetches_until(self, partition: TopicIdPartition, last_offset: int) -> list[FetchedFrom]:
        """With one that has asked for `last_offset`, which has to come."""
        deadline = time.monotonic() + TIMEOUT_S
        while last_offset not in [one.offset for one in self.fetches(partition)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody fetched {partition} from offset {last_offset} on")
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
                        if found["request"]:  # of what was under way when the log was turned on, nothing is said
                            yield found


def _records_bytes(response: Any, topic: str, partition: int) -> int:
    """In a session an answer names only what has something to say."""
    return sum(
        answer["recordsSizeInBytes"]
        for answered in response["responses"]
        if answered["topicId"] == topic
        for answer in answered["partitions"]
        if answer["partitionIndex"] == partition
    )


@contextmanager
def request_log(kafka: KafkaCluster) -> Iterator[RequestLog]:
    """Of every broker, from now on."""
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
