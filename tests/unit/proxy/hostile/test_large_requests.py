"""A thread decodes large requests and answers, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis import config_entries, coordinated_ids, named_topics
from protocol.header import build_request_header, build_response_header
from protocol.primitives import INT16, INT32, write_array_length, write_string
from protocol.request_items import MAX_ITEMS
from proxy.config import LimitsConfig
from proxy.handlers import (
    addresses,
    alter_configs,
    delete_topics,
    describe_configs,
    metadata,
    metadata_topic_guard,
    own_ids_guard,
)
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from proxy.handlers.off_loop import LOOP_BYTES, SLICE_ITEMS, off_loop
from proxy.wire.exchange import Answer, Handler, HandlerState, Prepare
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, request
from tests.support.proxy.proxy_harness import AnsweringHandler, proxy_before
from tests.support.proxy.topic_configs_bench import METADATA_TOPIC, Bench

NAME = write_string("a", compact=False)
LARGE_BYTES = 488 * 1024
CASES: dict[str, tuple[Any, str, int, int, bytes, bytes]] = {
    "DeleteTopics": (delete_topics, "named_topics", ApiKey.DELETE_TOPICS, 1, NAME, INT32.pack(1)),
    "CreatePartitions": (
        metadata_topic_guard, "without_topics", ApiKey.CREATE_PARTITIONS, 0, NAME + bytes(4) + INT32.pack(-1), bytes(5)
    ),
    "AlterConfigs": (
        alter_configs, "parse_config_request", ApiKey.ALTER_CONFIGS, 0, b"\x02" + NAME + bytes(4), b"\x00"
    ),
    "DescribeConfigs": (
        describe_configs, "parse_describe_configs_request", ApiKey.DESCRIBE_CONFIGS, 1, b"\x02" + NAME + bytes(4),
        b"\x00"
    ),
}  # fmt: skip
"""By API: the module and the function that decodes, the API key, the version, an item, and what follows the items."""


class NotAnsweredError(Exception):
    """The broker is asked, and the test ends."""


def guard() -> MetadataTopicGuard:
    def no_name(topic_id: UUID) -> str | None:
        return None

    return MetadataTopicGuard([METADATA_TOPIC], no_name)


def deletion(bench: Bench) -> Handler:
    return DeleteTopicsHandler(guard(), bench.cluster, bench.metadata, asyncio.get_running_loop().create_task)


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("api", CASES)
async def test_a_large_request_is_decoded_beside_the_loop(
    api: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, decoder, api_key, version, item, end = CASES[api]
    count = MAX_ITEMS if is_large else 3
    frame = request(api_key, version, 9, INT32.pack(count) + item * count + end)
    decoded_in: list[bool] = []
    decode = getattr(module, decoder)

    def noted(*arguments: Any) -> Any:
        decoded_in.append(threading.current_thread() is threading.main_thread())
        return decode(*arguments)

    def never(_: bytes) -> bytes:
        raise NotAnsweredError

    monkeypatch.setattr(module, decoder, noted)
    bench = Bench(asyncio.get_running_loop().create_task)
    handlers: Mapping[int, Handler] = {
        ApiKey.DELETE_TOPICS: deletion(bench),
        ApiKey.CREATE_PARTITIONS: guard(),
        ApiKey.ALTER_CONFIGS: bench.alter,
        ApiKey.DESCRIBE_CONFIGS: bench.describe,
    }
    action, _ = handlers[api_key].on_request(FakeExchange(bench.cluster, frame, answer=never))
    if isinstance(action, Prepare):
        with contextlib.suppress(NotAnsweredError):
            await action.decide()
    assert decoded_in == [not is_large]


async def test_the_question_for_many_topics_is_built_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in: list[bool] = []
    build = delete_topics._metadata_request

    def noted(*arguments: Any) -> bytes:
        built_in.append(threading.current_thread() is threading.main_thread())
        return build(*arguments)

    def never(_: bytes) -> bytes:
        raise NotAnsweredError

    monkeypatch.setattr(delete_topics, "_metadata_request", noted)
    bench = Bench(asyncio.get_running_loop().create_task)
    frame = request(ApiKey.DELETE_TOPICS, 1, 9, INT32.pack(LOOP_BYTES) + NAME * LOOP_BYTES + INT32.pack(1))
    action, _ = deletion(bench).on_request(FakeExchange(bench.cluster, frame, answer=never))
    assert isinstance(action, Prepare)
    with contextlib.suppress(NotAnsweredError):
        await action.decide()
    assert built_in == [False]


KEY_ANSWER = b"\x02a" + INT32.pack(1) + b"\x02h" + INT32.pack(9) + INT16.pack(0) + b"\x01\x00"
REFUSED = "tidegate/refused/0"
LARGE_ANSWERS: dict[str, tuple[Any, str, int, int, bytes, bytes, bytes]] = {
    "FindCoordinator": (addresses, "rewrite_addresses", ApiKey.FIND_COORDINATOR, 4, bytes(4), KEY_ANSWER, b"\x00"),
    "CreatePartitions": (
        metadata_topic_guard, "with_refusals", ApiKey.CREATE_PARTITIONS, 0, bytes(4),
        NAME + INT16.pack(3) + INT16.pack(-1), b""
    ),
    "DeleteGroups": (own_ids_guard, "with_refused_groups", ApiKey.DELETE_GROUPS, 1, bytes(4), NAME + bytes(2), b""),
    "Produce": (addresses, "rewrite_addresses", ApiKey.PRODUCE, 10, b"", b"\x02a\x01\x00", bytes(5)),
    "Metadata": (
        metadata, "with_refusals", ApiKey.METADATA, 0, bytes(4), INT16.pack(3) + NAME + bytes(4), b""
    ),
}  # fmt: skip
"""By API: the module and the function that patches, the API key, the version, the bytes before the number of items, an
item, and what follows the items."""


@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("api", LARGE_ANSWERS)
async def test_a_large_answer_is_patched_beside_the_loop(
    api: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, patcher, api_key, version, before, item, end = LARGE_ANSWERS[api]
    patched_in: set[bool] = set()
    patch = getattr(module, patcher)

    def noted(*arguments: Any) -> Any:
        patched_in.add(threading.current_thread() is threading.main_thread())
        return patch(*arguments)

    monkeypatch.setattr(module, patcher, noted)
    replaced = {REFUSED: named_topics.Replaced(METADATA_TOPIC, None)}
    states: Mapping[int, HandlerState] = {
        ApiKey.FIND_COORDINATOR: addresses.AddressRewriter(api_key, version, lambda _: ("proxy", 1)),
        ApiKey.PRODUCE: addresses.AddressRewriter(api_key, version, lambda _: ("proxy", 1)),
        ApiKey.CREATE_PARTITIONS: metadata_topic_guard._State(api_key, version, replaced),
        ApiKey.DELETE_GROUPS: own_ids_guard._Refusing(version, "ours"),
        ApiKey.METADATA: metadata._Refusing(version, replaced, lambda _: None),
    }
    count = LARGE_BYTES // len(item) if is_large else 3
    compact = api_key in (ApiKey.FIND_COORDINATOR, ApiKey.PRODUCE)
    body = before + write_array_length(count, compact) + item * count + end
    result = states[api_key].on_response(memoryview(build_response_header(api_key, version, 9) + body))
    if asyncio.iscoroutine(result):
        result = await result
    assert isinstance(result, tuple)
    assert patched_in == {not is_large}


async def test_a_request_above_the_limit_of_decoded_requests_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    limit = LimitsConfig().max_held_request_bytes
    assert limit <= 1024 * 1024
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={ApiKey.DELETE_TOPICS: AnsweringHandler(b"")}) as proxy,
        connected(proxy.port) as client,
    ):
        await client.send(request(ApiKey.DELETE_TOPICS, 1, 9, bytes(limit)))
        assert await client.ended() == b""
    assert "above limits.held.request.max.bytes" in caplog.records[0].message


async def test_a_large_answer_is_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded_in: list[bool] = []
    decode = named_topics.deleted_topics

    def noted(*arguments: Any) -> Any:
        decoded_in.append(threading.current_thread() is threading.main_thread())
        return decode(*arguments)

    monkeypatch.setattr(delete_topics, "deleted_topics", noted)
    bench = Bench(asyncio.get_running_loop().create_task)
    _, state = deletion(bench).on_request(FakeExchange(bench.cluster, request(ApiKey.DELETE_TOPICS, 1, 9)))
    assert state is not None
    count = LOOP_BYTES
    answer = build_response_header(ApiKey.DELETE_TOPICS, 1, 9) + bytes(4) + INT32.pack(count)
    result = state.on_response(memoryview(answer + (NAME + INT16.pack(3)) * count))
    assert asyncio.iscoroutine(result)
    await result
    assert decoded_in == [False]


async def test_a_request_with_too_many_items_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={ApiKey.CREATE_PARTITIONS: guard()}) as proxy,
        connected(proxy.port) as client,
    ):
        _, _, api_key, version, item, end = CASES["CreatePartitions"]
        count = MAX_ITEMS + 1
        await client.send(request(api_key, version, 9, INT32.pack(count) + item * count + end))
        assert await client.ended() == b""
    assert f"a request with {count} items or more, above the limit of {MAX_ITEMS}" in caplog.records[0].message


async def test_the_settings_of_many_topics_leave_the_thread_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic has about 35 settings, so the answer for 10,000 topics takes the thread seconds."""
    loop = asyncio.get_running_loop()
    turns: list[str] = []
    show = describe_configs.tier_entries

    def noted(*arguments: Any, **more: Any) -> Any:
        if not turns:
            other = off_loop(LOOP_BYTES + 1, lambda: turns.append("other"))
            loop.call_soon_threadsafe(tasks.create_task, other)
        turns.append("topic")
        return show(*arguments, **more)

    monkeypatch.setattr(describe_configs, "tier_entries", noted)
    bench = Bench(loop.create_task)
    names = [f"topic-{number}" for number in range(2 * SLICE_ITEMS)]
    bench.cluster.topics = {name: UUID(int=number + 1) for number, name in enumerate(names)}
    strings = [write_string(name, compact=False) for name in names]
    resources = b"".join(b"\x02" + name + INT32.pack(-1) for name in strings)
    action, state = bench.describe.on_request(
        FakeExchange(bench.cluster, request(ApiKey.DESCRIBE_CONFIGS, 1, 9, INT32.pack(len(names)) + resources + b"\0"))
    )
    assert isinstance(action, Prepare)
    await action.decide()
    answers = b"".join(INT16.pack(0) + INT16.pack(-1) + b"\x02" + name + INT32.pack(0) for name in strings)
    head = build_response_header(ApiKey.DESCRIBE_CONFIGS, 1, 9) + bytes(4)
    assert state is not None
    result = state.on_response(memoryview(head + INT32.pack(len(names)) + answers))
    assert asyncio.iscoroutine(result)
    async with asyncio.TaskGroup() as tasks:
        await result
    assert turns == ["topic"] * SLICE_ITEMS + ["other"] + ["topic"] * SLICE_ITEMS


@pytest.mark.parametrize("is_large", [True, False])
async def test_a_large_request_with_the_owners_group_is_refused_beside_the_loop(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused_in: list[bool] = []

    def noted(*arguments: Any) -> bytes:
        refused_in.append(threading.current_thread() is threading.main_thread())
        return coordinated_ids.refusal(*arguments)

    monkeypatch.setattr(own_ids_guard, "refusal", noted)
    count = 2 * LOOP_BYTES // 4 if is_large else 3
    item = b"\x02a\x01\x00"
    body = b"\x05ours" + bytes(4) + b"\x01\x00" + write_array_length(count, compact=True) + item * count + b"\x00"
    head = build_request_header(ApiKey.OFFSET_COMMIT, 8, 9, "client")
    handler = own_ids_guard.OwnIdsGuard(own_ids_guard.OwnIds("ours"))
    bench = Bench(asyncio.get_running_loop().create_task)
    action, _ = handler.on_request(FakeExchange(bench.cluster, head + body))
    if isinstance(action, Prepare):
        action = await action.decide()
    assert isinstance(action, Answer)
    assert refused_in == [not is_large]


async def test_many_refused_topics_are_patched_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_in: set[bool] = set()

    def noted(*arguments: Any) -> Any:
        replaced_in.add(threading.current_thread() is threading.main_thread())
        return config_entries.replace_error(*arguments)

    monkeypatch.setattr(alter_configs, "replace_error", noted)
    bench = Bench(asyncio.get_running_loop().create_task)
    names = [f"refused-{number}" for number in range(LOOP_BYTES)]
    resources = b"".join(b"\x02" + write_string(name, compact=False) + bytes(4) for name in names)
    frame = request(ApiKey.ALTER_CONFIGS, 0, 9, INT32.pack(len(names)) + resources + b"\x00")
    answers = b"".join(INT16.pack(29) + INT16.pack(-1) + b"\x02" + write_string(name, compact=False) for name in names)
    response = build_response_header(ApiKey.ALTER_CONFIGS, 0, 9) + bytes(4) + INT32.pack(len(names)) + answers
    action, state = bench.alter.on_request(FakeExchange(bench.cluster, frame, answer=lambda _: response))
    assert isinstance(action, Prepare)
    await action.decide()
    assert state is not None
    patched = state.on_response(memoryview(response))
    assert asyncio.iscoroutine(patched)
    assert b"".join(await patched) == response
    assert replaced_in == {False}
