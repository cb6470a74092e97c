"""DeleteTopics: the proxy records that a tiered topic is about to be deleted, and only then asks the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DeleteTopicsRequest, DeleteTopicsResponse
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from protocol.header import build_request_header, build_response_header, parse_request_header
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.guards import MetadataTopicGuard
from proxy.wire.exchange import BrokerGoneError, Prepare
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.proxy.topic_configs_bench import METADATA_TOPIC, ORDERS, RULED, Bench
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason

PLAIN = UUID(int=3)
NO_ID = UUID(int=0)
VERSIONS = (1, 5, 6)
TIMED_OUT, UNAUTHORIZED = 7, 29
DELETE, DESCRIBE = 6, 8
SEEN = LogStart(0, 0, LogStartReason.SEEN)


class Deletion(Bench):
    """`orders` is tiered, `ruled` has settings alone, `plain` has nothing to do with the tier."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().create_task)
        self.answer_first = self.answered_topics
        self.cluster.topics["plain"] = PLAIN
        self.metadata.tier_configs[TopicIdPartition(RULED, 0, "ruled")] = {"remote.storage.enable": "true"}
        self.guard = MetadataTopicGuard([METADATA_TOPIC], self.cluster.topic_name)
        self.handler = DeleteTopicsHandler(self.guard, self.metadata.log, self.metadata)
        self.operations = {DELETE, DESCRIBE}
        """Kafka's numbers of what the client may do with every topic."""
        self.recorded_before: set[UUID] = set()
        """The recorded deletions when the broker got the request."""

    @property
    def recorded(self) -> set[UUID]:
        assert not any(each.is_confirmed for each in self.metadata.state.topic_deletions().values())
        return set(self.metadata.state.topic_deletions())

    def answered_topics(self, frame: bytes) -> bytes:
        """The broker's answer to a Metadata request of the client. If one topic has an id, the broker ignores names."""
        header = parse_request_header(frame)
        request = MetadataRequest.decode(frame[header.body_position :], version=header.api_version)
        assert not request.allow_auto_topic_creation
        assert request.include_topic_authorized_operations
        names = {topic_id: name for name, topic_id in self.cluster.topics.items()}
        topic = MetadataResponse.MetadataResponseTopic
        topics = [
            topic(error_code=0, name=name, topic_id=self.cluster.topics[name], is_internal=False, partitions=[],
                  authorized_operations=self.operations)
            if name in self.cluster.topics
            else topic(error_code=3, name=name, topic_id=one.topic_id, is_internal=False, partitions=[])
            for one in request.topics
            for name in [one.name or names.get(one.topic_id)]
            if one.topic_id != NO_ID or all(each.topic_id == NO_ID for each in request.topics)
        ]  # fmt: skip
        response = MetadataResponse(throttle_time_ms=0, brokers=[], cluster_id="c", controller_id=1, topics=topics)
        head = build_response_header(header.api_key, header.api_version, header.correlation_id)
        return head + bytes(response.encode(version=header.api_version))

    async def delete(
        self, version: int, names: Sequence[str] = (), ids: Sequence[UUID] = (), codes: Mapping[str, int] | None = None
    ) -> dict[str | None, int]:
        """The client's error codes by topic; the broker answers with `codes`, else without an error."""
        request: dict[str, Any] = {"topic_names": list(names)}
        if version >= 6:
            state = DeleteTopicsRequest.DeleteTopicState
            topics = [state(name=name, topic_id=NO_ID) for name in names]
            request = {"topics": topics + [state(name=None, topic_id=each) for each in ids]}
        name_of = {topic_id: name for name, topic_id in self.cluster.topics.items()}

        def answer(seen: Any) -> Any:
            self.recorded_before = self.recorded
            one = DeleteTopicsResponse.DeletableTopicResult
            asked = seen.topic_names if version < 6 else [each.name or name_of[each.topic_id] for each in seen.topics]
            results = [
                one(
                    name=name,
                    topic_id=self.cluster.topics.get(name, NO_ID),
                    error_code=(codes or {}).get(name, 0 if name in self.cluster.topics else 3),
                    error_message=None,
                )
                for name in asked
            ]
            return DeleteTopicsResponse(throttle_time_ms=0, responses=results)

        made = DeleteTopicsRequest(timeout_ms=5, **request)
        _, response = await self.pass_through(self.handler, made, version, DeleteTopicsResponse, answer)
        return {each.name: each.error_code for each in response.responses}


@pytest.fixture
async def bench() -> Deletion:
    made = Deletion()
    await made.metadata.put_log_start(TopicIdPartition(ORDERS, 4, "orders"), SEEN)
    return made


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_deletion_is_recorded_before_the_broker_hears_of_it(bench: Deletion, version: int) -> None:
    assert await bench.delete(version, ["orders", "plain"]) == {"orders": 0, "plain": 0}
    assert bench.recorded_before == bench.recorded == {ORDERS}


async def test_topics_are_named_by_names_and_by_ids(bench: Deletion) -> None:
    assert await bench.delete(6, ["ruled", "plain"], [ORDERS]) == {"ruled": 0, "plain": 0, "orders": 0}
    assert bench.recorded_before == {ORDERS, RULED}


async def test_a_client_without_the_right_to_delete_records_nothing(bench: Deletion) -> None:
    bench.operations = {DESCRIBE}
    assert await bench.delete(5, ["orders"], codes={"orders": UNAUTHORIZED}) == {"orders": UNAUTHORIZED}
    assert bench.recorded == set()


async def test_a_topic_that_the_broker_does_not_know_is_forwarded(bench: Deletion) -> None:
    assert await bench.delete(6, ["missing"]) == {"missing": 3}
    assert bench.recorded == set()


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_topics_of_the_remote_log_are_still_kept_away(bench: Deletion, version: int) -> None:
    bench.cluster.topics[METADATA_TOPIC] = own = UUID(int=77)
    codes = await bench.delete(version, [METADATA_TOPIC, "orders"], [own] if version >= 6 else [])
    assert codes == {METADATA_TOPIC: UNAUTHORIZED, "orders": 0} | ({None: UNAUTHORIZED} if version >= 6 else {})
    assert bench.recorded == {ORDERS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("error", [RemoteLogMetadataError("no quorum"), ValueError("a defect")])
async def test_without_a_record_a_tiered_topic_is_not_deleted(
    bench: Deletion, version: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench.metadata.fail_writes = error
    codes = {"tidegate/refused/0": 3, "tidegate/refused/1": 3}
    answered = await bench.delete(version, ["orders", "ruled", "plain"], codes=codes)
    assert answered == {"orders": TIMED_OUT, "ruled": TIMED_OUT, "plain": 0}
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert {each.__dict__["topic"] for each in warned} == {"orders", "ruled"}


async def test_by_id_a_topic_without_a_record_is_not_deleted_either(bench: Deletion) -> None:
    bench.metadata.fail_writes = RemoteLogMetadataError("no quorum")
    assert await bench.delete(6, ids=[ORDERS, PLAIN]) == {None: TIMED_OUT, "plain": 0}


async def test_a_topic_that_may_be_tiered_is_not_deleted(bench: Deletion, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_open(topic_id: UUID) -> bool:
        raise RemoteLogMetadataNotReadyError("the state is not open")

    monkeypatch.setattr(bench.metadata.state, "is_tiered", not_open)
    bench.metadata.fail_writes = RemoteLogMetadataNotReadyError("the state is not open")
    assert await bench.delete(6, ["orders"]) == {"orders": TIMED_OUT}


async def test_topics_beyond_the_time_of_one_request_are_refused(bench: Deletion) -> None:
    bench.handler = DeleteTopicsHandler(bench.guard, bench.metadata.log, bench.metadata, max_wait_ms=0)
    assert await bench.delete(6, ["orders", "plain"]) == {"orders": TIMED_OUT, "plain": 0}
    assert bench.recorded == set()


async def test_a_broker_that_is_gone_ends_the_connection(bench: Deletion) -> None:
    frame = build_request_header(20, 1, 9, "test") + DeleteTopicsRequest(topic_names=["orders"]).encode(version=1)
    exchange = FakeExchange(bench.cluster, bytes(frame))
    exchange.may_forward = False
    action, _ = bench.handler.on_request(exchange)
    assert isinstance(action, Prepare)
    with pytest.raises(BrokerGoneError):
        await action.decide()
