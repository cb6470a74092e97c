"""Large requests and answers are worked on in slices, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from protocol import addresses as protocol_addresses
from protocol.api_keys import ApiKey
from protocol.apis import config_entries, coordinated_ids, named_topics
from protocol.header import build_request_header, build_response_header
from protocol.primitives import INT16, INT32, MAX_ITEMS, write_array_length, write_string
from protocol.splice import splice
from protocol.steps import Stepped
from proxy.handlers import (
    addresses,
    delete_topics,
    describe_configs,
    guards,
)
from proxy.handlers.delete_topics import DeleteTopicsHandler
from proxy.handlers.guards import MetadataTopicGuard
from proxy.handlers.turns import SLICE_STEPS
from proxy.wire.exchange import Answer, Handler, Prepare, Respond
from proxy.wire.limits import Limits
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.wire import request
from tests.support.proxy.proxy_harness import AnsweringHandler, relayed
from tests.support.proxy.topic_configs_bench import METADATA_TOPIC, Bench
from tests.support.proxy.turn_counter import TurnCounter, counted_turns

NAME = write_string("a", compact=False)
LARGE_BYTES = 488 * 1024
MANY = 3 * SLICE_STEPS
CASES: dict[str, tuple[Stepped[..., Any], int, int, bytes, bytes]] = {
    "DeleteTopics": (named_topics.named_topics, ApiKey.DELETE_TOPICS, 1, NAME, INT32.pack(1)),
    "CreatePartitions": (
        named_topics.without_topics, ApiKey.CREATE_PARTITIONS, 0, NAME + bytes(4) + INT32.pack(-1), bytes(5)
    ),
    "AlterConfigs": (
        config_entries.parse_config_request, ApiKey.ALTER_CONFIGS, 0, b"\x02" + NAME + bytes(4), b"\x00"
    ),
    "DescribeConfigs": (
        config_entries.parse_describe_configs_request, ApiKey.DESCRIBE_CONFIGS, 1, b"\x02" + NAME + bytes(4),
        b"\x00"
    ),
}  # fmt: skip
"""By API: what decodes, the API key, the version, an item, and what follows the items."""


class NotAnsweredError(Exception):
    """The broker is asked, and the test ends."""


def never(_: bytes) -> bytes:
    raise NotAnsweredError


def assert_sliced(turns: TurnCounter, items: int) -> None:
    assert sum(turns.notes.values()) >= items
    assert max(turns.notes.values()) <= SLICE_STEPS


def guard() -> MetadataTopicGuard:
    def no_name(topic_id: UUID) -> str | None:
        return None

    return MetadataTopicGuard([METADATA_TOPIC], no_name)


def deletion(bench: Bench) -> Handler:
    return DeleteTopicsHandler(guard(), bench.metadata.log, bench.metadata)


@pytest.mark.parametrize("api", CASES)
async def test_a_large_request_is_decoded_in_slices(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, api_key, version, item, end = CASES[api]
    frame = request(api_key, version, 9, INT32.pack(MAX_ITEMS) + item * MAX_ITEMS + end)
    bench = Bench(asyncio.get_running_loop().create_task)
    handlers: Mapping[int, Handler] = {
        ApiKey.DELETE_TOPICS: deletion(bench),
        ApiKey.CREATE_PARTITIONS: guard(),
        ApiKey.ALTER_CONFIGS: bench.alter,
        ApiKey.DESCRIBE_CONFIGS: bench.describe,
    }
    async with counted_turns() as turns:
        monkeypatch.setattr(decoder, "steps", turns.noted(decoder.steps))
        action, _ = handlers[api_key].on_request(FakeExchange(bench.cluster, frame, answer=never))
        assert isinstance(action, Prepare)
        with contextlib.suppress(NotAnsweredError):
            await action.decide()
    assert_sliced(turns, MAX_ITEMS)


@pytest.mark.parametrize("step", ["_metadata_requests", "_deletable"])
async def test_the_question_and_the_answer_about_many_topics_take_slices(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a deletion, the proxy asks the broker about the topics."""
    bench = Bench(asyncio.get_running_loop().create_task)
    names = b"".join(write_string(f"topic-{number}", False) for number in range(MANY))
    frame = request(ApiKey.DELETE_TOPICS, 1, 9, INT32.pack(MANY) + names + INT32.pack(1))
    head = build_response_header(ApiKey.METADATA, 12, 9) + bytes(4) + b"\x01" + b"\x00" + INT32.pack(1)
    topic = INT16.pack(3) + b"\x02a" + bytes(16) + b"\x00" + b"\x01" + bytes(4) + b"\x00"
    answer = head + write_array_length(MANY, compact=True) + topic * MANY + b"\x00"
    action, _ = deletion(bench).on_request(FakeExchange(bench.cluster, frame, answer=lambda _: answer))
    assert isinstance(action, Prepare)
    async with counted_turns() as turns:
        monkeypatch.setattr(delete_topics, step, turns.noted(getattr(delete_topics, step)))
        await action.decide()
    assert_sliced(turns, MANY)


KEY_ANSWER = b"\x02a" + INT32.pack(1) + b"\x02h" + INT32.pack(9) + INT16.pack(0) + b"\x01\x00"
REFUSED = "tidegate/refused/0"
LARGE_ANSWERS: dict[str, tuple[Stepped[..., Any], int, int, bytes, bytes, bytes]] = {
    "FindCoordinator": (
        protocol_addresses.rewrite_addresses, ApiKey.FIND_COORDINATOR, 4, bytes(4), KEY_ANSWER, b"\x00"
    ),
    "CreatePartitions": (
        named_topics.with_refusals, ApiKey.CREATE_PARTITIONS, 0, bytes(4),
        NAME + INT16.pack(3) + INT16.pack(-1), b""
    ),
    "DeleteGroups": (coordinated_ids.with_refused_groups, ApiKey.DELETE_GROUPS, 1, bytes(4), NAME + bytes(2), b""),
    "Produce": (protocol_addresses.rewrite_addresses, ApiKey.PRODUCE, 10, b"", b"\x02a\x01\x00", bytes(5)),
    "Metadata": (
        named_topics.with_refusals, ApiKey.METADATA, 0, bytes(4), INT16.pack(3) + NAME + bytes(4), b""
    ),
}  # fmt: skip
"""By API: what patches, the API key, the version, the bytes before the number of items, an
item, and what follows the items."""


@pytest.mark.parametrize("api", LARGE_ANSWERS)
async def test_a_large_answer_is_patched_in_slices(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher, api_key, version, before, item, end = LARGE_ANSWERS[api]
    replaced = {REFUSED: named_topics.Replaced(METADATA_TOPIC, None, guards.REFUSAL)}
    responds: Mapping[int, Respond] = {
        ApiKey.FIND_COORDINATOR: addresses.with_addresses(api_key, version, lambda _: ("proxy", 1)),
        ApiKey.PRODUCE: addresses.with_addresses(api_key, version, lambda _: ("proxy", 1)),
        ApiKey.CREATE_PARTITIONS: guards.refusing(api_key, version, replaced),
        ApiKey.DELETE_GROUPS: guards.refusing_group(version, "ours"),
        ApiKey.METADATA: guards.refusing(api_key, version, replaced, lambda _: None),
    }
    count = LARGE_BYTES // len(item)
    compact = api_key in (ApiKey.FIND_COORDINATOR, ApiKey.PRODUCE)
    body = before + write_array_length(count, compact) + item * count + end
    async with counted_turns() as turns:
        monkeypatch.setattr(patcher, "steps", turns.noted(patcher.steps))
        result = responds[api_key](memoryview(build_response_header(api_key, version, 9) + body))
        assert asyncio.iscoroutine(result)
        await result
    assert_sliced(turns, count)


async def test_a_request_above_the_limit_of_decoded_requests_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    limit = Limits().max_held_request_bytes
    assert limit <= 1024 * 1024
    async with relayed(handlers={ApiKey.DELETE_TOPICS: AnsweringHandler(b"")}) as (client, _, _):
        await client.send(request(ApiKey.DELETE_TOPICS, 1, 9, bytes(limit)))
        assert await client.ended() == b""
    assert "above the limit of requests that are decoded" in caplog.records[0].message


async def test_a_request_with_too_many_items_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with relayed(handlers={ApiKey.CREATE_PARTITIONS: guard()}) as (client, _, _):
        _, api_key, version, item, end = CASES["CreatePartitions"]
        count = MAX_ITEMS + 1
        await client.send(request(api_key, version, 9, INT32.pack(count) + item * count + end))
        assert await client.ended() == b""
    assert f"a request with {count} items or more, above the limit of {MAX_ITEMS}" in caplog.records[0].message


async def test_the_settings_of_many_topics_are_shown_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic has about 35 settings, so the answer for 10,000 topics takes seconds."""
    bench = Bench(asyncio.get_running_loop().create_task)
    settings = 35
    names = [f"topic-{number}" for number in range(SLICE_STEPS)]
    bench.cluster.topics = {name: UUID(int=number + 1) for number, name in enumerate(names)}
    strings = [write_string(name, compact=False) for name in names]
    resources = b"".join(b"\x02" + name + INT32.pack(-1) for name in strings)
    action, respond = bench.describe.on_request(
        FakeExchange(bench.cluster, request(ApiKey.DESCRIBE_CONFIGS, 1, 9, INT32.pack(len(names)) + resources + b"\0"))
    )
    assert isinstance(action, Prepare)
    await action.decide()
    entries = INT32.pack(settings) + (NAME + NAME + bytes(3) + INT32.pack(0)) * settings
    answers = b"".join(INT16.pack(0) + INT16.pack(-1) + b"\x02" + name + entries for name in strings)
    head = build_response_header(ApiKey.DESCRIBE_CONFIGS, 1, 9) + bytes(4)
    assert respond is not None
    async with counted_turns() as turns:
        monkeypatch.setattr(describe_configs, "tier_entries", turns.noted(describe_configs.tier_entries))
        result = respond(memoryview(head + INT32.pack(len(names)) + answers))
        assert asyncio.iscoroutine(result)
        await result
    assert_sliced(turns, settings * len(names))


async def test_a_large_request_with_the_owners_group_is_refused_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    item = b"\x02a\x01\x00"
    body = b"\x05ours" + bytes(4) + b"\x01\x00" + write_array_length(MANY, compact=True) + item * MANY + b"\x00"
    head = build_request_header(ApiKey.OFFSET_COMMIT, 8, 9, "client")
    handler = guards.OwnIdsGuard(guards.OwnIds("ours"))
    bench = Bench(asyncio.get_running_loop().create_task)
    async with counted_turns() as turns:
        decoder = coordinated_ids.refusal
        monkeypatch.setattr(decoder, "steps", turns.noted(decoder.steps))
        action, _ = handler.on_request(FakeExchange(bench.cluster, head + body))
        assert isinstance(action, Prepare)
        assert isinstance(await action.decide(), Answer)
    assert_sliced(turns, MANY)


async def test_many_refused_topics_are_patched_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(asyncio.get_running_loop().create_task)
    names = [f"refused-{number}" for number in range(MANY)]
    resources = b"".join(b"\x02" + write_string(name, compact=False) + bytes(4) for name in names)
    frame = request(ApiKey.ALTER_CONFIGS, 0, 9, INT32.pack(len(names)) + resources + b"\x00")
    answers = b"".join(INT16.pack(29) + INT16.pack(-1) + b"\x02" + write_string(name, compact=False) for name in names)
    response = build_response_header(ApiKey.ALTER_CONFIGS, 0, 9) + bytes(4) + INT32.pack(len(names)) + answers
    action, respond = bench.alter.on_request(FakeExchange(bench.cluster, frame, answer=lambda _: response))
    assert isinstance(action, Prepare)
    await action.decide()
    assert respond is not None
    async with counted_turns() as turns:
        monkeypatch.setattr(splice, "steps", turns.noted(splice.steps))
        patched = respond(memoryview(response))
        assert asyncio.iscoroutine(patched)
        assert b"".join(await patched) == response
    assert_sliced(turns, MANY)
