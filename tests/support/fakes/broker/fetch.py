"""Fetch: reads, limits and errors are those of Kafka. It opens a session if a request asks for one.

See docs/semantics.md 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer import FetchResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

SESSION_ID = 77
THROTTLE_MS = 1_234
_Topic = FetchResponse.FetchableTopicResponse
_Partition = _Topic.PartitionData


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return FetchResponse(
        throttle_time_ms=0,
        error_code=0,
        session_id=SESSION_ID if request.session_epoch is not None and request.session_epoch >= 0 else 0,
        responses=[
            _Topic(
                topic=topic.topic,
                topic_id=topic.topic_id,
                partitions=[
                    _read(broker, topic.topic or broker.topic_name(topic.topic_id), asked) for asked in topic.partitions
                ],
            )
            for topic in request.topics
        ],
        node_endpoints=[],
    )


def _read(broker: ScriptedBroker, topic: str, asked: Any) -> Any:
    log = broker.logs[topic, asked.partition]
    error_code = log.error_code
    if not error_code and asked.current_leader_epoch is not None and 0 <= asked.current_leader_epoch < log.leader_epoch:
        error_code = 74
    has_diverged = asked.last_fetched_epoch in range(log.leader_epoch + 1) and asked.fetch_offset > log.high_watermark
    if not error_code and not has_diverged and not log.log_start_offset <= asked.fetch_offset <= log.high_watermark:
        error_code = 1
    known = -1 if error_code else log.high_watermark
    return _Partition(
        partition_index=asked.partition,
        error_code=error_code,
        high_watermark=known,
        last_stable_offset=known,
        log_start_offset=-1 if error_code else log.log_start_offset,
        aborted_transactions=None,
        preferred_read_replica=-1,
        records=b"" if error_code else log.read(asked.fetch_offset, asked.partition_max_bytes, min_one=True),
    )


def with_error(error_code: int, partition: int = 0) -> Callable[[Any], None]:
    """Sets an error in one partition of every topic."""

    def edit(response: Any) -> None:
        for topic in response.responses:
            for one in topic.partitions:
                if one.partition_index == partition:
                    one.error_code = error_code
                    one.high_watermark = one.last_stable_offset = one.log_start_offset = -1
                    one.records = b""

    return edit


def with_session_error(error_code: int) -> Callable[[Any], None]:
    def edit(response: Any) -> None:
        response.error_code, response.session_id, response.responses = error_code, 0, []

    return edit


def led_by(node_id: int, host: str, port: int, partition: int = 0, error_code: int = 6) -> Callable[[Any], None]:
    """Sets a leadership error, and the leader's address in the response (KIP-951)."""

    def edit(response: Any) -> None:
        with_error(error_code, partition)(response)
        for topic in response.responses:
            for one in topic.partitions:
                if one.partition_index == partition:
                    one.current_leader = _Partition.LeaderIdAndEpoch(leader_id=node_id, leader_epoch=9)
        response.node_endpoints = [FetchResponse.NodeEndpoint(node_id=node_id, host=host, port=port, rack="r")]

    return edit


def throttled(response: Any) -> None:
    """Throttles as a broker does: the response has a throttle time and no partitions."""
    response.throttle_time_ms, response.responses = THROTTLE_MS, []


def preferring(node_id: int) -> Callable[[Any], None]:
    """Sets a preferred read replica for every partition (KIP-392)."""

    def edit(response: Any) -> None:
        for topic in response.responses:
            for one in topic.partitions:
                one.preferred_read_replica, one.records = node_id, b""

    return edit
