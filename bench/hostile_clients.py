"""Measures the cost of hostile clients: memory over many requests, silent connections, and a broker that is gone.

Run `python -m bench.hostile_clients memory|silent|blackhole [count]`. The count is that of the requests or connections.
The proxy is `tidegate serve` without a remote tier, in front of a real Kafka. `memory` and `silent` show the memory of
its process without mapped files. The kernel's memory for the sockets is not in it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from confluent_kafka import Producer

from bench.ending import run
from protocol.api_keys import ApiKey
from protocol.header import build_request_header
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

TOPIC = "hostile"
TIMEOUT_S = 60.0
PAGE_BYTES = resource.getpagesize()
KIB = 1024

UNKNOWN_VERSION = 99
"""The proxy answers ApiVersions of this version itself."""
PIPELINED = 1_000
SAMPLES = 20
STALLED_S = 0.3
"""A client that cannot send for this time is not read from."""

SILENT = 10_000
SPARE_FILES = 500
SETTLING_S = 1.0
ROUNDS = 5

WATCHED_S = 2.0
AT_ONCE = 50


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + payload


def api_versions(version: int) -> bytes:
    body = b"" if version < 3 or version == UNKNOWN_VERSION else b"\x02b\x021\x00"  # the client's name and version
    return framed(build_request_header(ApiKey.API_VERSIONS, version, 1, "bench") + body)


def receive(client: socket.socket, count: int) -> bytes:
    """Receives `count` bytes, or less if the other side closes the connection."""
    data = bytearray()
    while len(data) < count and (part := client.recv(count - len(data))):
        data += part
    return bytes(data)


def ask(client: socket.socket, request: bytes) -> int:
    """Returns the size of the answer. 0: the connection was closed instead."""
    client.sendall(request)
    size = int.from_bytes(receive(client, 4))
    return 4 + len(receive(client, size)) if size else 0


@contextlib.contextmanager
def tidegate(cluster: KafkaCluster, limits: str = "", upstream: str | None = None) -> Iterator[TidegateProcess]:
    """`limits` are lines of TOML for the section `[limits]`. `upstream` are the brokers that it asks first."""
    with tempfile.TemporaryDirectory() as home:
        proxy = tidegate_over(cluster, Path(home), storage={}, upstream=upstream)
        text = proxy.config.read_text()
        assert "[limits]\n" in text
        proxy.config.write_text(text.replace("[limits]\n", f"[limits]\n{limits}\n"))
        with proxy:
            yield proxy


def resident_bytes(proxy: TidegateProcess) -> int:
    _, resident, of_files, *_ = map(int, Path(f"/proc/{proxy.pid}/statm").read_text().split())
    return (resident - of_files) * PAGE_BYTES


# Memory over many requests


def answered(proxy: TidegateProcess) -> int:
    """Returns the number of ApiVersions requests that the proxy has taken so far."""
    name = 'tidegate_requests_total{api="ApiVersions"} '
    return next((int(float(line.split()[-1])) for line in proxy.metrics().splitlines() if line.startswith(name)), 0)


def reading_client(proxy: TidegateProcess, requests: int) -> None:
    """Sends requests, and reads every answer."""
    one = api_versions(UNKNOWN_VERSION)
    with socket.create_connection(proxy.address, TIMEOUT_S) as client:
        answer_bytes = ask(client, one)
        for _ in range(requests // PIPELINED):
            client.sendall(one * PIPELINED)
            receive(client, answer_bytes * PIPELINED)


def client_that_never_reads(proxy: TidegateProcess, receive_buffer_bytes: int = 4 * KIB) -> socket.socket:
    """Sends requests until the proxy does not read from it any more."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.settimeout(STALLED_S)
    client.connect(proxy.address)
    many = api_versions(UNKNOWN_VERSION) * PIPELINED
    with contextlib.suppress(TimeoutError):
        while True:
            client.sendall(many)
    return client


def measure_slope(proxy: TidegateProcess, name: str, requests: int, send: Callable[[int], None]) -> None:
    """`send` sends about so many requests. The first sample comes after a tenth of all requests."""
    send(requests // 10)
    first = answered(proxy)
    samples: list[tuple[int, int]] = []
    while not samples or samples[-1][0] < requests * 0.9:
        samples.append((answered(proxy) - first, resident_bytes(proxy)))
        send(requests // SAMPLES)
    counts, sizes = zip(*samples, strict=True)
    slope, _ = statistics.linear_regression(counts, sizes)
    grown = (statistics.median(sizes[-3:]) - statistics.median(sizes[:3])) / KIB
    print(f"| {name} | {first + counts[-1]:,} | {slope:.3f} | {grown:.0f} | {sizes[-1] / KIB / KIB:.1f} |", flush=True)


def memory(requests: int) -> None:
    with KafkaCluster() as cluster, tidegate(cluster) as proxy:

        def never_read(count: int) -> None:
            """Clients come one after the other, because each of them is soon not read from. Each ends with a reset."""
            until = answered(proxy) + count
            while answered(proxy) < until:
                with client_that_never_reads(proxy) as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

        print("| client | requests | slope, bytes a request | grown, KiB | resident MiB |\n|---|---|---|---|---|")
        measure_slope(proxy, "reads", requests, lambda count: reading_client(proxy, count))
        measure_slope(proxy, "never reads", requests, never_read)
        before, asked_before = resident_bytes(proxy), answered(proxy)
        clients = [client_that_never_reads(proxy) for _ in range(ROUNDS * 4)]
        grown, asked = resident_bytes(proxy) - before, answered(proxy) - asked_before
        print(f"\n{len(clients)} clients that never read and stay, with {asked:,} requests: "
              f"{grown / len(clients) / KIB:.0f} KiB each")  # fmt: skip
        for client in clients:
            client.close()


# Silent connections


def stay_silent(pipe: Connection, address: tuple[str, int], count: int) -> None:
    clients = [socket.create_connection(address, TIMEOUT_S) for _ in range(count)]
    pipe.send(len(clients))
    pipe.recv()


def time_to_first_answer(bootstrap: str) -> float:
    """Returns the seconds from the start of a producer to its first acknowledgement."""
    began = time.perf_counter()
    done: list[float] = []

    def on_delivery(error: object, message: object) -> None:
        if error is None:
            done.append(time.perf_counter() - began)

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "log_level": 3})
    producer.produce(TOPIC, b"first", on_delivery=on_delivery)
    producer.flush(TIMEOUT_S)
    if not done:
        raise RuntimeError("the producer was not served")
    return done[0]


def first_answers(proxy: TidegateProcess) -> str:
    times = [time_to_first_answer(proxy.bootstrap_servers) * 1000 for _ in range(ROUNDS)]
    return f"{statistics.median(times):.0f} (at most {max(times):.0f})"


def open_connections(proxy: TidegateProcess) -> int:
    lines = (line for line in proxy.metrics().splitlines() if line.startswith("tidegate_open_connections "))
    return int(float(next(lines).split()[-1]))


def settled_connections(proxy: TidegateProcess) -> int:
    """Returns the number of open connections, once the proxy has accepted all that wait in the kernel."""
    before, now = -1, open_connections(proxy)
    while now != before:
        time.sleep(SETTLING_S)
        before, now = now, open_connections(proxy)
    return now


def silent(count: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < count + SPARE_FILES:
        raise RuntimeError(f"a process may open {most} files only, and {count} connections need more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    unlimited = (
        f"max.connections = {count}\n"
        "max.unauthenticated.connections.per.address = 0\n"
        'connection.setup.timeout.ms = "10m"'
    )
    print("| limits | silent | open | KiB each | producer's first answer, ms | before |\n|---|---|---|---|---|---|")
    with KafkaCluster() as cluster:
        create_topic(cluster.bootstrap_servers, TOPIC)
        for name, limits in (("none per address", unlimited), ("the defaults", "")):
            with tidegate(cluster, limits) as proxy:
                quiet = first_answers(proxy)
                before = resident_bytes(proxy)
                context = multiprocessing.get_context("spawn")
                ours, theirs = context.Pipe()
                clients = context.Process(target=stay_silent, args=(theirs, proxy.address, count))
                clients.start()
                try:
                    ours.recv()
                    still = settled_connections(proxy)
                    each = (resident_bytes(proxy) - before) / still / KIB
                    crowded = first_answers(proxy)
                finally:
                    ours.send(None)
                    clients.join()
            print(f"| {name} | {count:,} | {still:,} | {each:.1f} | {crowded} | {quiet} |", flush=True)


# A broker that answers nothing


@contextlib.contextmanager
def full_backlog(address: tuple[str, int]) -> Iterator[None]:
    """Connects to a broker that is stopped, until the kernel answers no SYN for it any more."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(socket.create_connection(address, 1.0))
            except TimeoutError:
                break
        yield


def until_answered(address: tuple[str, int]) -> float:
    """Returns how long a client waits from its connect to the broker's first answer."""
    began = time.perf_counter()
    with socket.create_connection(address, TIMEOUT_S) as client:
        if not ask(client, api_versions(3)):
            raise RuntimeError("the proxy closed the connection")
    return time.perf_counter() - began


def until_closed(address: tuple[str, int]) -> float:
    """Returns how long a client waits until the proxy closes its connection."""
    began = time.perf_counter()
    with socket.create_connection(address, TIMEOUT_S) as client:
        if ask(client, api_versions(3)):
            raise RuntimeError("the broker answers")
    return time.perf_counter() - began


class SteadyClient(threading.Thread):
    """Asks again and again, and notes the times of the answers."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self.times_ms: list[float] = []
        self._address = address
        self._stops = threading.Event()

    def run(self) -> None:
        request = api_versions(3)
        with socket.create_connection(self._address, TIMEOUT_S) as client:
            while not self._stops.wait(0.002):
                began = time.perf_counter()
                if not ask(client, request):
                    return
                self.times_ms.append((time.perf_counter() - began) * 1000)

    def take(self) -> str:
        taken, self.times_ms = self.times_ms, []
        taken.sort()
        return f"p50 {taken[len(taken) // 2]:.1f}, p99 {taken[len(taken) * 99 // 100]:.1f}, most {taken[-1]:.1f} ms"

    def stop(self) -> None:
        self._stops.set()
        self.join()


def blackhole(clients: int) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(KafkaCluster(brokers=3))
        upstream = ",".join("{}:{}".format(*cluster.address(node_id)) for node_id in (3, 1, 2))
        proxy = stack.enter_context(tidegate(cluster, upstream=upstream))
        host, port = proxy.address
        steady = SteadyClient((host, port + 1))
        steady.start()
        try:
            time.sleep(WATCHED_S)
            print(f"another broker's client before: {steady.take()}")
            cluster.pause_broker(3)
            with full_backlog(cluster.address(3)):
                for number in range(1, ROUNDS):
                    waited_s = until_answered(proxy.address)
                    print(f"client {number} of the bootstrap port, which leads to broker 3 first: {waited_s:.3f} s")
                print(f"one client of the broker is closed after {until_closed((host, port + 3)):.2f} s")
                print(f"another broker's client meanwhile: {steady.take()}")
                waited: list[float] = []
                waiting = [
                    threading.Thread(target=lambda: waited.append(until_closed((host, port + 3))))
                    for _ in range(clients)
                ]
                for thread in waiting:
                    thread.start()
                for thread in waiting:
                    thread.join()
                print(f"{clients} clients at once: {min(waited):.2f} to {max(waited):.2f} s")
                print(f"another broker's client meanwhile: {steady.take()}")
            cluster.resume_broker(3)
        finally:
            steady.stop()


def main() -> int | None:
    scenarios = {"memory": (memory, 1_000_000), "silent": (silent, SILENT), "blackhole": (blackhole, AT_ONCE)}
    if len(sys.argv) < 2 or sys.argv[1] not in scenarios:
        print(__doc__)
        return 2
    scenario, default = scenarios[sys.argv[1]]
    scenario(int(sys.argv[2]) if len(sys.argv) > 2 else default)
    return None


if __name__ == "__main__":
    run(main)
