"""A ListOffsets request of many partitions is worked on in slices, and the event loop goes on between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from struct import Struct
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.list_offsets import parse_list_offsets_request, parse_list_offsets_response
from protocol.errors import ErrorCode
from protocol.header import build_request_header, build_response_header, response_body_position
from protocol.primitives import INT32, write_array_length, write_string
from proxy.handlers.base import FetchSettings
from proxy.handlers.turns import SLICE_STEPS
from proxy.wire.exchange import Prepare
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.proxy.list_offsets_bench import ASKED_V1, EARLIEST, NEXT_LOCAL, Bench, bench_of
from tests.support.proxy.turn_counter import counted_turns


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with bench_of(tmp_path, FetchSettings(list_offsets_timeout_ms=60_000)) as made:
        yield made


async def test_many_partitions_are_answered_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3 * SLICE_STEPS
    name = INT32.pack(1) + write_string("orders", compact=False) + INT32.pack(count)
    frame = build_request_header(ApiKey.LIST_OFFSETS, 1, 9, "test") + INT32.pack(-1) + name
    frame += b"".join(ASKED_V1.pack(partition, EARLIEST) for partition in range(count))
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    payload = build_response_header(ApiKey.LIST_OFFSETS, 1, 9) + name
    payload += b"".join(
        Struct(">ihqq").pack(partition, code if partition else 0, -1, -1 if partition else 4)
        for partition in range(count)
    )
    async with counted_turns() as counter:
        for decoder in (parse_list_offsets_request, parse_list_offsets_response):
            monkeypatch.setattr(decoder, "steps", counter.noted(decoder.steps))
        action, respond = bench.handler.on_request(FakeExchange(bench.cluster, frame))
        assert isinstance(action, Prepare)
        await action.decide()
        assert respond is not None
        answer = respond(memoryview(payload))
        assert asyncio.iscoroutine(answer)
        body = b"".join(await answer)
        monkeypatch.undo()
    found = parse_list_offsets_response(body, response_body_position(ApiKey.LIST_OFFSETS, 1, body), 1).partitions
    assert [(one.error_code, one.offset) for one in found] == [(0, 0)] + [(code, -1)] * (count - 1)
    assert sum(counter.notes.values()) >= 4 * count
    assert max(counter.notes.values()) <= SLICE_STEPS


async def test_many_names_without_a_right_are_looked_up_in_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3 * SLICE_STEPS
    frame = build_request_header(ApiKey.LIST_OFFSETS, 6, 9, "test") + INT32.pack(-1) + b"\0"
    frame += write_array_length(count, compact=True)
    for number in range(count):
        frame += write_string(f"made-up-{number}", compact=True) + write_array_length(1, compact=True)
        frame += Struct(">iiq").pack(0, 5, NEXT_LOCAL) + b"\0\0"
    look_up = bench.cluster.topic_id
    async with counted_turns() as counter:

        def noted(name: str, max_age_ms: int | None = None) -> UUID | None:
            counter.note()
            return look_up(name, max_age_ms)

        monkeypatch.setattr(bench.cluster, "topic_id", noted)
        action, _ = bench.handler.on_request(FakeExchange(bench.cluster, frame + b"\0"))
        assert isinstance(action, Prepare)
        await action.decide()
    assert sum(counter.notes.values()) == count
    assert max(counter.notes.values()) <= SLICE_STEPS
