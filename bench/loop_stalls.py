"""Measures how long the metadata of a large cluster holds up the event loop.

Run `python -m bench.loop_stalls [partitions]`.

A process of its own answers as a broker of a cluster with 50,000 partitions does. The measured process asks it over
loopback, as the proxy does. A ticker runs in every turn of the loop. The longest turn is the longest stall. The time is
the CPU time of the loop's thread, because other load on the machine is no stall of the proxy. The wall time is beside
it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any
from uuid import UUID

import uvloop
from kafka.protocol.metadata import ApiVersionsResponse, MetadataRequest, MetadataResponse

from protocol.addresses import rewrite_addresses
from protocol.api_keys import ApiKey
from proxy.cluster.broker_listeners import ListenerAddresses
from proxy.cluster.topology import Topology
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.model.ids import TopicIdPartition

VERSION = 12
ROUNDS = 5
BROKERS = 3
CHANGING = "changing"
"""The client id that gets another answer each time."""
TOPIC = MetadataResponse.MetadataResponseTopic


def topics_of(topics: int, partitions: int, leader_epoch: int) -> list[Any]:
    each = partitions // topics
    return [
        TOPIC(
            error_code=0,
            name=f"topic-{number}",
            topic_id=UUID(int=1 + number),
            is_internal=False,
            partitions=[
                TOPIC.MetadataResponsePartition(
                    error_code=0,
                    partition_index=index,
                    leader_id=index % BROKERS,
                    leader_epoch=leader_epoch,
                    replica_nodes=list(range(BROKERS)),
                    isr_nodes=list(range(BROKERS)),
                    offline_replicas=[],
                )
                for index in range(each)
            ],
        )
        for number in range(topics)
    ]


def answer(topics: list[Any], port: int) -> bytes:
    broker = MetadataResponse.MetadataResponseBroker
    response = MetadataResponse(
        throttle_time_ms=0,
        brokers=[broker(node_id=node_id, host="127.0.0.1", port=port, rack=None) for node_id in range(BROKERS)],
        cluster_id="bench",
        controller_id=0,
        topics=topics,
    )
    return bytes(response.encode(version=VERSION))


def serve(pipe: Connection, topics: int, partitions: int) -> None:
    asyncio.run(_serve(pipe, topics, partitions))


async def _serve(pipe: Connection, topics: int, partitions: int) -> None:
    whole: list[bytes] = []
    one: list[bytes] = []
    asked = 0
    versions = [
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.METADATA, min_version=0, max_version=VERSION),
        ApiVersionsResponse.ApiVersion(api_key=ApiKey.API_VERSIONS, min_version=0, max_version=3),
    ]
    api_versions = bytes(ApiVersionsResponse(error_code=0, api_keys=versions, throttle_time_ms=0).encode(version=3))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(4))
                frame = await reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            correlation_id = frame[4:8]
            if int.from_bytes(frame[:2]) == ApiKey.API_VERSIONS:
                payload = correlation_id + api_versions
            else:
                end = 10 + int.from_bytes(frame[8:10])
                request = MetadataRequest.decode(frame[end + 1 :], version=VERSION)
                if request.topics is None:
                    asked += frame[10:end] == CHANGING.encode()
                    body = whole[asked % len(whole)]
                else:
                    body = one[1] if request.topics else one[0]
                payload = correlation_id + b"\0" + body
            writer.write(len(payload).to_bytes(4) + payload)
            await writer.drain()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one += [answer([], port), answer(topics_of(topics, partitions, 1)[:1], port)]
    # All leaders change from the first answer to the second. The third is from a broker that lags behind.
    whole += [answer(topics_of(topics, partitions, epoch), port) for epoch in (1, 3, 2)]
    pipe.send((port, whole[0]))
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def longest_turn(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Returns the longest turn of the loop during `work`, in milliseconds of CPU and of wall time."""
    loop = asyncio.get_running_loop()
    longest = [0.0, 0.0]
    last = time.thread_time(), time.perf_counter()
    is_over = False

    def tick() -> None:
        nonlocal last
        now = time.thread_time(), time.perf_counter()
        longest[0] = max(longest[0], now[0] - last[0])
        longest[1] = max(longest[1], now[1] - last[1])
        last = now
        if not is_over:
            loop.call_soon(tick)

    loop.call_soon(tick)
    for _ in range(ROUNDS):
        await work()
    is_over = True
    await asyncio.sleep(0)
    return longest[0] * 1e3, longest[1] * 1e3


async def measure(port: int, whole: bytes, topics: int, partitions: int) -> None:
    client, changing = (
        BrokerClient([("127.0.0.1", port)], client_id=client_id, request_timeout_ms=60_000)
        for client_id in ("bench", CHANGING)
    )
    addresses = ListenerAddresses("127.0.0.1", "proxy.example", 9092, 9100)
    topology = Topology(client, [], [(addresses, lambda host, port, endpoint: None)], clock_ms=monotonic_ms)
    topology.topics.use_topic("topic-0")
    partition = TopicIdPartition(UUID(int=1), 0, "topic-0")
    response = b"\0\0\0\1\0" + whole

    async def as_objects() -> None:
        message = MetadataRequest(topics=None, allow_auto_topic_creation=False)
        await client.request(None, message, max_version=VERSION)

    async def rewrite() -> None:
        rewrite_addresses(ApiKey.METADATA, VERSION, response, lambda node_id: ("proxy.example", 9100 + node_id))

    print(f"\n{topics:,} topics, {partitions:,} partitions, {len(whole):,} bytes\n")
    print("| question | longest turn, CPU ms | wall ms |\n|---|---|---|")
    for name, work in (
        ("refresh of the brokers and of one topic in use", topology.refresh),
        ("leader of a partition", lambda: client.leader_of(partition, max_age_ms=0)),
        ("survey of all topics", lambda: client.metadata()),
        ("survey of all topics, while all leaders change", lambda: changing.metadata()),
        ("answer to a client that asks for all topics", rewrite),
        ("all topics decoded into objects, as before", as_objects),
    ):
        cpu_ms, wall_ms = await longest_turn(work)
        print(f"| {name} | {cpu_ms:.2f} | {wall_ms:.2f} |", flush=True)
    await client.close()
    await changing.close()


def main() -> None:
    partitions = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    gc.collect()
    gc.freeze()  # as `proxy.process.app.serve` does
    context = multiprocessing.get_context("spawn")
    for topics in (1_000, 10_000, 1):
        ours, theirs = context.Pipe()
        broker = context.Process(target=serve, args=(theirs, topics, partitions))
        broker.start()
        port, whole = ours.recv()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(measure(port, whole, topics, partitions))
        finally:
            ours.send(None)
            broker.join()


if __name__ == "__main__":
    main()
