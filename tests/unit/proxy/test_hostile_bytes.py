"""Random bytes from either side may end their connection. No handler fails, and other connections continue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct
from collections.abc import Mapping

import pytest

from protocol.api_keys import ApiKey
from proxy.config import LimitsConfig
from proxy.handlers.produce import ProduceHandler
from proxy.process.app import pass_through_handlers
from proxy.wire.context import Address
from proxy.wire.exchange import PrefixHandler
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import proxy_before

ROUNDS = 60
KEYS = [*ApiKey, -5, 999]


def advertised(node_id: int) -> Address:
    return "proxy.example", 9100 + node_id


def hostile_requests(rnd: random.Random) -> bytes:
    out = b""
    for _ in range(rnd.randrange(1, 6)):
        head = struct.pack(">hhi", rnd.choice(KEYS), rnd.randrange(-1, 20), rnd.randrange(100))
        client_id = rnd.choice([b"\xff\xff", b"\x00\x00", b"\x00\x02ab", b""])
        out += frame(head + client_id + rnd.randbytes(rnd.choice([0, 3, 30, 3000])))
    return out if rnd.random() < 0.8 else out[: rnd.randrange(len(out))]


async def be_hostile(rnd: random.Random, broker: FakeBroker) -> None:
    async with asyncio.TaskGroup() as tasks:
        while True:
            with contextlib.suppress(TimeoutError):
                tasks.create_task(answer_hostilely(rnd, await broker.accepted()))


async def answer_hostilely(rnd: random.Random, upstream: Wire) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        while True:
            asked = await upstream.receive()
            if rnd.random() < 0.1:
                await upstream.send_raw(rnd.randbytes(rnd.randrange(40)))
            await upstream.send(asked[4:8] + rnd.randbytes(rnd.choice([0, 1, 10, 200, 100_000])))


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_bytes_end_no_more_than_their_connection(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rnd = random.Random(seed)
    handlers = pass_through_handlers()
    prefix_handlers: Mapping[int, PrefixHandler] = {ApiKey.PRODUCE: ProduceHandler()}
    async with (
        FakeBroker() as broker,
        proxy_before(
            broker,
            handlers=handlers,
            prefix_handlers=prefix_handlers,
            address_of=advertised,
            limits=LimitsConfig(half_close_timeout_ms=10),
            close_timeout_ms=1_000,
        ) as proxy,
        connected(proxy.port) as bystander,
        asyncio.TaskGroup() as tasks,
    ):
        await bystander.send(request(ApiKey.HEARTBEAT, 0, 1))
        bystanders_broker = await broker.accepted()
        hostile_broker = tasks.create_task(be_hostile(rnd, broker))
        for number in range(ROUNDS):
            async with connected(proxy.port) as client:
                with contextlib.suppress(OSError):
                    data = hostile_requests(rnd)
                    cut = rnd.randrange(len(data) + 1)
                    await client.send_raw(data[:cut])
                    await client.send_raw(data[cut:])
                    client.half_close()
                await client.ended()
            await bystander.send(request(ApiKey.HEARTBEAT, 0, number))
        for correlation_id in (1, *range(ROUNDS)):
            assert (await bystanders_broker.receive())[4:8] == correlation_id.to_bytes(4)
            await bystanders_broker.send(response(correlation_id))
            assert await bystander.receive() == response(correlation_id)
        hostile_broker.cancel()
    assert "protocol_error" in proxy.metrics.closed
    assert [record.message for record in caplog.records if "handler failed" in record.message] == []
