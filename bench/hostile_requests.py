"""Measures how long costly requests of many clients keep one of another client waiting, and what memory they take.

Run `python -m bench.hostile_requests [clients]`, or with `memory [clients]` or `answers [clients]`.

Each hostile client sends its request again as soon as the last one is decoded or refused. Meanwhile one client sends
ListOffsets requests for 400 partitions, one after the other. The table has the wall time of their decoding, and the
longest turn of the event loop meanwhile. There is no broker: the requests go through the decoder alone.

For `memory`, each client pipelines ListOffsets requests for 49,000 partitions, to a broker that never answers. The
table has the memory of the proxy's process, while they send and after they have left.

For `answers`, each client asks for the settings of one topic many times in one DescribeConfigs request, and does not
read the answer of 5 MiB. Meanwhile one more client sends such requests, and reads its answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import resource
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import uvloop

from bench.loop_stalls import longest_turn
from protocol.api_keys import ApiKey
from protocol.apis.config_entries import parse_config_request
from protocol.apis.fetch.request import parse_fetch_request
from protocol.apis.list_offsets import parse_list_offsets_request
from protocol.apis.named_topics import named_topics
from protocol.errors import ProtocolError
from protocol.header import build_request_header, parse_request_header
from protocol.primitives import INT8, INT16, INT32, write_array_length, write_string
from protocol.steps import Steps
from proxy.config import LimitsConfig
from proxy.handlers.base import FetchSettings
from proxy.handlers.turns import in_turns
from proxy.metrics import ProxyMetrics
from proxy.wire.context import Router
from proxy.wire.server import BrokerEndpoint, ProxyServer
from tests.support.proxy.list_offsets_bench import bench_of
from tests.support.proxy.topic_configs_bench import Bench as TopicConfigsBench

HONEST_REQUESTS = 20
SENDING_S = 15.0
LEFT_S = 10.0
"""Longer than `half.close.timeout.ms`."""
LARGEST_BYTES = 950 * 1024
ANSWER_BYTES = 5 << 20
ANSWERED_S = 30.0
NAME = write_string("a", compact=False)
EPOCHS_AND_OFFSETS = bytes(12)


def deletion(topics: int) -> bytes:
    return build_request_header(ApiKey.DELETE_TOPICS, 1, 1, "c") + INT32.pack(topics) + NAME * topics + INT32.pack(1)


def settings(entries: int) -> bytes:
    head = build_request_header(ApiKey.ALTER_CONFIGS, 0, 1, "c") + INT32.pack(1) + b"\x02" + NAME
    return head + INT32.pack(entries) + (write_string("", False) * 2) * entries + b"\x00"


def fetch(partitions: int) -> bytes:
    head = build_request_header(ApiKey.FETCH, 4, 1, "c") + INT32.pack(-1) + bytes(13)
    return head + INT32.pack(1) + NAME + INT32.pack(partitions) + bytes(16) * partitions


def list_offsets(partitions: int) -> bytes:
    head = build_request_header(ApiKey.LIST_OFFSETS, 1, 1, "c") + INT32.pack(-1)
    return head + INT32.pack(1) + NAME + INT32.pack(partitions) + EPOCHS_AND_OFFSETS * partitions


def decode_fetch(frame: bytes) -> Steps[object]:
    return parse_fetch_request.steps(frame, parse_request_header(frame).body_position, 4)


def decode_list_offsets(frame: bytes) -> Steps[object]:
    return parse_list_offsets_request.steps(frame, parse_request_header(frame).body_position, 1)


HOSTILE: Mapping[str, tuple[Callable[[bytes], Steps[object]], bytes]] = {
    "DeleteTopics, 10,000 topics": (named_topics.steps, deletion(10_000)),
    "DeleteTopics, 950 KiB": (named_topics.steps, deletion(LARGEST_BYTES // len(NAME))),
    "AlterConfigs, 950 KiB of settings": (parse_config_request.steps, settings(LARGEST_BYTES // 4)),
    "Fetch, 49,000 partitions": (decode_fetch, fetch(49_000)),
}


async def measure(name: str, clients: int) -> None:
    decode, frame = HOSTILE[name]
    honest = list_offsets(400)
    waits_ms: list[float] = []

    async def attack() -> None:
        while True:
            try:
                await in_turns(decode(frame))
            except ProtocolError:  # the client opens another connection
                await asyncio.sleep(0)

    async def ask() -> None:
        for _ in range(HONEST_REQUESTS // 5):  # `longest_turn` repeats it
            before = time.perf_counter()
            await in_turns(decode_list_offsets(honest))
            waits_ms.append(1e3 * (time.perf_counter() - before))

    async with asyncio.TaskGroup() as tasks:
        attacks = [tasks.create_task(attack()) for _ in range(clients)]
        await asyncio.sleep(0)
        cpu_ms, wall_ms = await longest_turn(ask)
        for task in attacks:
            task.cancel()
    waits_ms.sort()
    median = waits_ms[len(waits_ms) // 2]
    print(f"| {name} | {median:.0f} | {waits_ms[-1]:.0f} | {cpu_ms:.1f} | {wall_ms:.1f} |", flush=True)


# Memory


def serve(pipe: Connection, address: tuple[str, int]) -> None:
    asyncio.run(_serve(pipe, address))


async def _serve(pipe: Connection, address: tuple[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with bench_of(Path(folder), FetchSettings()) as made, asyncio.TaskGroup() as tasks:
            describe = TopicConfigsBench(tasks.create_task).describe
            router = Router({ApiKey.LIST_OFFSETS: made.handler, ApiKey.DESCRIBE_CONFIGS: describe})
            async with ProxyServer(router, LimitsConfig(), ProxyMetrics()) as server:
                pipe.send(server.listen("127.0.0.1", 0, BrokerEndpoint(1, lambda: [address])))
                await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


class Broker(asyncio.Protocol):
    """Answers requests of a few bytes with `answer`. It reads larger ones, and does not answer."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        size = INT32.unpack_from(data)[0]
        if self.answer and size + 4 == len(data):
            self.transport.writelines((INT32.pack(4 + len(self.answer)), data[8:12], self.answer))


def serve_as_broker(pipe: Connection, answer: bytes) -> None:
    async def run() -> None:
        Broker.answer = answer
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Broker, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[:2])
        await loop.run_in_executor(None, pipe.recv)

    asyncio.run(run())


@contextlib.contextmanager
def proxy_in_a_process(answer: bytes = b"") -> Iterator[tuple[int, tuple[str, int]]]:
    """Yields the id of the proxy's process, and its address."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    context = multiprocessing.get_context("spawn")
    ends = []
    address: object = answer
    process_id = None
    for target in (serve_as_broker, serve):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, address))
        process.start()
        process_id, address = process.pid, ours.recv()
        ends.append((ours, process))
    try:
        yield cast(int, process_id), cast(tuple[str, int], address)
    finally:
        for ours, process in reversed(ends):
            ours.send(None)
            process.join()


def resident_mib(process_id: int) -> int:
    _, resident, of_files, *_ = map(int, Path(f"/proc/{process_id}/statm").read_text().split())
    return (resident - of_files) * resource.getpagesize() >> 20


def connect(address: tuple[str, int]) -> socket.socket:
    client = socket.create_connection(address)
    client.setblocking(False)
    return client


def send_for(address: tuple[str, int], clients: list[socket.socket], data: bytes, process_id: int) -> int:
    """Lets the clients send as fast as the proxy reads. Returns the most memory that it had.

    A client whose connection the proxy has closed connects again."""
    sent, most_mib = [0] * len(clients), 0
    until_s = time.monotonic() + SENDING_S
    while time.monotonic() < until_s:
        for number, client in enumerate(clients):
            try:
                sent[number] += client.send(memoryview(data)[sent[number] % len(data) :])
            except BlockingIOError:
                continue
            except ConnectionError:
                client.close()
                clients[number], sent[number] = connect(address), 0
        most_mib = max(most_mib, resident_mib(process_id))
        time.sleep(0.001)
    return most_mib


def measure_memory(count: int) -> None:
    frame = list_offsets(49_000)
    with proxy_in_a_process() as (process_id, address):
        before_mib = resident_mib(process_id)
        clients = [connect(address) for _ in range(count)]
        most_mib = send_for(address, clients, len(frame).to_bytes(4) + frame, process_id)
        for client in clients:
            client.close()
        time.sleep(LEFT_S)
        print("| clients | before, MiB | most, MiB | after they left, MiB |\n|---|---|---|---|")
        print(f"| {count} | {before_mib} | {most_mib} | {resident_mib(process_id)} |")


def configs_answer() -> bytes:
    """Returns the body of a DescribeConfigs answer of version 1 about one topic, as a broker sends it."""
    entries = write_array_length(40, compact=False)
    for number in range(40):
        name = write_string(f"the.setting.{number:02}", compact=False)
        entries += name + write_string("604800000", compact=False) + b"\x00\x05\x00" + INT32.pack(1)
        entries += name + write_string("604800000", compact=False) + b"\x05"
    topic = INT16.pack(0) + write_string(None, compact=False) + INT8.pack(2) + write_string("orders", compact=False)
    count = ANSWER_BYTES // len(topic + entries)
    return INT32.pack(0) + INT32.pack(count) + (topic + entries) * count


def measure_answers(count: int) -> None:
    body = INT32.pack(1) + INT8.pack(2) + write_string("orders", compact=False) + INT32.pack(-1) + b"\x00"
    frame = build_request_header(ApiKey.DESCRIBE_CONFIGS, 1, 1, "c") + body
    frame = len(frame).to_bytes(4) + frame
    answer = configs_answer()
    with proxy_in_a_process(answer) as (process_id, address):
        before_mib = most_mib = resident_mib(process_id)
        clients = [socket.create_connection(address) for _ in range(count)]
        for client in clients:
            client.sendall(frame)
        waits_s, until_s = list[float](), time.monotonic() + ANSWERED_S
        with socket.create_connection(address) as honest:
            while time.monotonic() < until_s:
                began_s, received_bytes = time.monotonic(), 0
                honest.sendall(frame)
                while received_bytes < len(answer):
                    if select.select([honest], [], [], 0.05)[0]:
                        received = honest.recv(1 << 20)
                        if not received:
                            raise ConnectionError("the proxy closed the connection of the client that reads")
                        received_bytes += len(received)
                    most_mib = max(most_mib, resident_mib(process_id))
                waits_s.append(time.monotonic() - began_s)
        for client in clients:
            client.close()
        time.sleep(LEFT_S)
        print("| clients | before, MiB | most, MiB | after, MiB | answers | longest wait, s |")
        print("|---|---|---|---|---|---|")
        after_mib = resident_mib(process_id)
        print(f"| {count} | {before_mib} | {most_mib} | {after_mib} | {len(waits_s)} | {max(waits_s):.1f} |")


def main() -> None:
    measures = {"memory": measure_memory, "answers": measure_answers}
    if sys.argv[1:2] and (measure_process := measures.get(sys.argv[1])):
        measure_process(int(sys.argv[2]) if len(sys.argv) > 2 else 1_000)
        return
    clients = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    gc.collect()
    gc.freeze()  # as `proxy.process.app.serve` does
    print(f"{clients} hostile clients\n")
    print("| their request | wait p50 ms | wait max ms | longest turn, CPU ms | wall ms |\n|---|---|---|---|---|")
    for name in HOSTILE:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(name, clients))


if __name__ == "__main__":
    main()
