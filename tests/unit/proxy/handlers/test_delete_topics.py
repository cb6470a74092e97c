"""DeleteTopics: the proxy records the tiered topics that the broker deleted, and no client waits long for that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DeleteTopicsRequest, DeleteTopicsResponse
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from protocol.header import build_response_header, parse_request_header
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from tests.support.fakes.broker.cluster import FakeCluster
from tests.support.proxy.topic_configs_bench import METADATA_TOPIC, ORDERS, RULED, Bench
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason

PLAIN = UUID(int=3)
NO_ID = UUID(int=0)
VERSIONS = range(1, 7)
BY_NAME_ALONE = range(1, 6)
TIMED_OUT, UNAUTHORIZED = 7, 29


class Deletion(Bench):
    """`orders` is tiered, `ruled` has settings alone, `plain` has nothing to do with the tier."""

    def __init__(self, group: asyncio.TaskGroup, max_wait_ms: int = 60_000) -> None:
        super().__init__(group.create_task)
        self.answer_first = lambda frame: answered_topics(self.cluster, frame)
        self.cluster.topics["plain"] = PLAIN
        self.metadata.tier_configs[TopicIdPartition(RULED, 0, "ruled")] = {"remote.storage.enable": "true"}
        guard = MetadataTopicGuard([METADATA_TOPIC], self.cluster.topic_name)
        self.handler = DeleteTopicsHandler(guard, self.cluster, self.metadata, group.create_task, max_wait_ms)

    async def open(self) -> None:
        seen = LogStart(0, 0, LogStartReason.SEEN)
        await self.metadata.put_log_start(TopicIdPartition(ORDERS, 4, "orders"), seen)

    async def delete(
        self,
        version: int,
        names: Sequence[str] = (),
        ids: Sequence[UUID] = (),
        codes: Mapping[str, int] | None = None,
        *,
        tells_ids: bool = True,
    ) -> dict[str | None, int]:
        """The client's error codes by topic; the broker answers with `codes`, else without an error."""
        request: dict[str, Any] = {"topic_names": list(names)}
        if version >= 6:
            state = DeleteTopicsRequest.DeleteTopicState
            topics = [state(name=name, topic_id=NO_ID) for name in names]
            request = {"topics": topics + [state(name=None, topic_id=each) for each in ids]}
        name_of = {topic_id: name for name, topic_id in self.cluster.topics.items()}
        topic_ids = dict(self.cluster.topics)

        def answer(seen: Any) -> Any:
            one = DeleteTopicsResponse.DeletableTopicResult
            asked = seen.topic_names if version < 6 else [each.name or name_of[each.topic_id] for each in seen.topics]
            results = [
                one(
                    name=name,
                    topic_id=topic_ids.get(name, NO_ID) if tells_ids else NO_ID,
                    error_code=(codes or {}).get(name, 0 if name in topic_ids else 3),
                    error_message=None,
                )
                for name in asked
            ]
            return DeleteTopicsResponse(throttle_time_ms=0, responses=results)

        made = DeleteTopicsRequest(timeout_ms=5, **request)
        _, response = await self.pass_through(self.handler, made, version, DeleteTopicsResponse, answer)
        return {each.name: each.error_code for each in response.responses}


def answered_topics(cluster: FakeCluster, frame: bytes) -> bytes:
    """The broker's answer to a Metadata request of the client: it may not see a topic if `is_reachable` is false."""
    header = parse_request_header(frame)
    request = MetadataRequest.decode(frame[header.body_position :], version=header.api_version)
    assert not request.allow_auto_topic_creation
    topic = MetadataResponse.MetadataResponseTopic
    topics = [
        topic(error_code=0, name=one.name, topic_id=cluster.topics[one.name], is_internal=False, partitions=[])
        if cluster.is_reachable and one.name in cluster.topics
        else topic(error_code=3, name=one.name, topic_id=NO_ID, is_internal=False, partitions=[])
        for one in request.topics
    ]
    response = MetadataResponse(throttle_time_ms=0, brokers=[], cluster_id="c", controller_id=1, topics=topics)
    head = build_response_header(header.api_key, header.api_version, header.correlation_id)
    return head + bytes(response.encode(version=header.api_version))


@pytest.fixture
async def bench() -> AsyncIterator[Deletion]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        made = Deletion(group)
        await made.open()
        yield made


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_deletion_is_recorded_before_the_client_hears_of_it(bench: Deletion, version: int) -> None:
    assert await bench.delete(version, ["orders", "plain"]) == {"orders": 0, "plain": 0}
    assert bench.metadata.deleted_topics == {ORDERS}


async def test_a_topic_is_named_by_its_id(bench: Deletion) -> None:
    bench.cluster.is_reachable = False
    assert await bench.delete(6, ids=[ORDERS, PLAIN]) == {"orders": 0, "plain": 0}
    assert bench.metadata.deleted_topics == {ORDERS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_settings_alone_are_something_to_be_forgotten(bench: Deletion, version: int) -> None:
    await bench.delete(version, ["ruled"])
    assert bench.metadata.deleted_topics == {RULED}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("code", [TIMED_OUT, UNAUTHORIZED])
async def test_a_topic_that_the_broker_refused_or_does_not_know_is_no_proof(
    bench: Deletion, version: int, code: int
) -> None:
    assert await bench.delete(version, ["orders", "ruled"], codes={"orders": code}) == {"orders": code, "ruled": 0}
    assert bench.metadata.deleted_topics == {RULED}


@pytest.mark.parametrize("topic", ["orders", "missing"])
async def test_ids_are_asked_for_with_the_rights_of_the_client(
    bench: Deletion, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("the proxy used its own rights")

    monkeypatch.setattr(bench.cluster, "current_topic_ids", never)
    assert await bench.delete(1, [topic], codes={topic: UNAUTHORIZED}) == {topic: UNAUTHORIZED}
    assert bench.metadata.deleted_topics == set()


@pytest.mark.parametrize("version", BY_NAME_ALONE)
async def test_the_id_is_the_one_that_the_name_had_before_the_request_left(
    bench: Deletion, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's last answer to all was older: the topic was made again since."""
    monkeypatch.setattr(bench.cluster, "topic_id", lambda name, max_age_ms=None: UUID(int=99))
    await bench.delete(version, ["orders"])
    assert bench.metadata.deleted_topics == {ORDERS}


@pytest.mark.parametrize("version", BY_NAME_ALONE)
async def test_an_id_that_cannot_be_asked_for_is_what_the_cluster_said_last(bench: Deletion, version: int) -> None:
    """Whatever id the name had before: it is deleted, by this request or by one before it."""
    bench.cluster.is_reachable = False
    assert await bench.delete(version, ["orders"]) == {"orders": 0}
    assert bench.metadata.deleted_topics == {ORDERS}


async def test_a_broker_that_tells_no_id_is_believed_by_name(bench: Deletion) -> None:
    await bench.delete(6, ["orders"], tells_ids=False)
    assert bench.metadata.deleted_topics == {ORDERS}


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_topic_without_a_known_id_is_deleted_without_a_record(bench: Deletion, version: int) -> None:
    assert await bench.delete(version, ["unheard-of"], codes={"unheard-of": 0}) == {"unheard-of": 0}
    assert bench.metadata.deleted_topics == set()


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_topics_of_the_remote_log_are_kept_away_still(bench: Deletion, version: int) -> None:
    bench.cluster.topics[METADATA_TOPIC] = UUID(int=77)
    codes = await bench.delete(version, [METADATA_TOPIC, "orders"])
    assert codes == {METADATA_TOPIC: UNAUTHORIZED, "orders": 0}
    assert bench.metadata.deleted_topics == {ORDERS}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("error", [RemoteLogMetadataError("no quorum"), ValueError("a defect")])
async def test_a_failed_record_is_logged_and_not_answered(
    bench: Deletion, version: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench.metadata.fail_writes = error
    assert await bench.delete(version, ["orders", "ruled"]) == {"orders": 0, "ruled": 0}
    assert bench.metadata.deleted_topics == set()
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert {each.__dict__["topic"] for each in warned} == {"orders", "ruled"}
    assert all("the record of the deletion may be missing" in each.getMessage() for each in warned)


async def test_a_topic_that_may_be_tiered_is_recorded_too(
    bench: Deletion, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_open(topic_id: UUID) -> bool:
        raise RemoteLogMetadataNotReadyError("the state is not open")

    monkeypatch.setattr(bench.metadata, "is_tiered", not_open)
    assert await bench.delete(6, ["orders"]) == {"orders": 0}
    assert "the record of the deletion may be missing" in caplog.text


async def test_no_client_waits_long_and_the_record_is_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    async with asyncio.timeout(60):
        async with asyncio.TaskGroup() as group:
            bench = Deletion(group, max_wait_ms=1)
            await bench.open()
            put = bench.metadata.put_topic_deletion

            async def slow(topic_id: UUID, topic: str) -> None:
                await gate.wait()
                await put(topic_id, topic)

            monkeypatch.setattr(bench.metadata, "put_topic_deletion", slow)
            assert await bench.delete(1, ["orders"]) == {"orders": 0}
            assert bench.metadata.deleted_topics == set()
            gate.set()
        assert bench.metadata.deleted_topics == {ORDERS}


async def test_a_client_that_goes_away_changes_nothing(bench: Deletion, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked, recorded = asyncio.Event(), asyncio.Event(), asyncio.Event()
    put = bench.metadata.put_topic_deletion

    async def slow(topic_id: UUID, topic: str) -> None:
        asked.set()
        await gate.wait()
        await put(topic_id, topic)
        recorded.set()

    monkeypatch.setattr(bench.metadata, "put_topic_deletion", slow)
    client = asyncio.create_task(bench.delete(4, ["orders"]))
    await asked.wait()
    client.cancel()
    await asyncio.wait([client])
    gate.set()
    await recorded.wait()
    assert bench.metadata.deleted_topics == {ORDERS}


async def test_a_proxy_that_stops_tells_what_it_did_not_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.Event()

    async def slow(topic_id: UUID, topic: str) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        spawned: list[asyncio.Task[None]] = []
        bench = Deletion(group)

        def spawn(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
            spawned.append(group.create_task(work))
            return spawned[-1]

        await bench.open()
        monkeypatch.setattr(bench.metadata, "put_topic_deletion", slow)
        monkeypatch.setattr(bench.handler, "_spawn", spawn)
        client = group.create_task(bench.delete(6, ["orders"]))
        await asked.wait()
        spawned[0].cancel()
        assert await client == {"orders": 0}
    assert "the record of the deletion may be missing" in caplog.text
