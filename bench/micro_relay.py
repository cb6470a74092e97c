"""What does the relay itself cost, without a broker? `python -m bench.micro_relay [scenario ...]`.

A client of a few lines sends Produce or Fetch requests through each relay to a broker of a few lines. The broker
answers every request at once with prepared bytes. So the CPU time of the relay's process is what the relay costs.
The relays take turns, and the figures are medians of the rounds. haproxy takes part if it is found. Tidegate takes part
with each way to relay, so the table shows what the splices and the sockets of its own gain. `--beside` adds other
relays: `--beside 'NAME=COMMAND {listen} {upstream}'`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

import uvloop

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.frame import frame_length
from protocol.header import build_request_header, build_response_header
from protocol.primitives import INT16, INT32, INT64, write_uvarint
from proxy.config import LimitsConfig
from proxy.handlers.produce import ProduceHandler
from proxy.metrics import ProxyMetrics
from proxy.process.app import pass_through_handlers
from proxy.wire.context import Router
from proxy.wire.server import BrokerEndpoint, ProxyServer
from proxy.wire.socket_transport import PipePool
from tests.support.servers.ports import free_ports

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FETCH_VERSION, PRODUCE_VERSION, SHARE_FETCH_VERSION = 17, 13, 1
PARTITION_BYTES = {"8k": 8_000, "30k": 30_000, "60k": 60_000, "1m": MIB}
TOPIC = UUID("12345678-9abc-def0-1234-56789abcdef0")
START_S, IDLE_S = 20.0, 60.0
REQUESTS = 5_000
"""The requests of a round, where the figure is the CPU time of one."""
HAPROXY = """
global
  nbthread 1
  maxconn 8000
  tune.bufsize {buffer}
defaults
  mode tcp
  timeout connect 10s
  timeout client 1h
  timeout server 1h
listen relay
  bind 127.0.0.1:{listen}
  server broker 127.0.0.1:{upstream}
"""


def _framed(*payload: bytes) -> bytes:
    return frame_length(*payload) + b"".join(payload)


def produce_request(size_bytes: int) -> bytes:
    """A request of one partition with acks=all. The records are zeros, because no one here reads them."""
    records = bytes(size_bytes)
    head = build_request_header(ApiKey.PRODUCE, PRODUCE_VERSION, 1, "producer-1")
    body = b"\x00" + INT16.pack(-1) + INT32.pack(30_000) + b"\x02" + TOPIC.bytes + b"\x02" + INT32.pack(0)
    return _framed(head, body, write_uvarint(size_bytes + 1), records, b"\x00\x00\x00")


def produce_response() -> bytes:
    head = build_response_header(ApiKey.PRODUCE, PRODUCE_VERSION, 1)
    partition = INT32.pack(0) + INT16.pack(0) + INT64.pack(100) + INT64.pack(-1) + INT64.pack(0) + b"\x01\x00\x00"
    return _framed(head, b"\x02", TOPIC.bytes, b"\x02", partition, b"\x00", INT32.pack(0), b"\x00")


def fetch_request() -> bytes:
    """A request of an incremental session, as a consumer sends it between two changes of its partitions."""
    head = build_request_header(ApiKey.FETCH, FETCH_VERSION, 1, "consumer-group-1-member-1")
    limits = INT32.pack(500) + INT32.pack(1) + INT32.pack(50 * MIB) + b"\x00"
    return _framed(head, limits, INT32.pack(7), INT32.pack(7), b"\x01\x01\x01\x00")


def fetch_response(partitions: int, records_bytes: int) -> bytes:
    records = bytes(records_bytes)
    entries = [
        encode_partition(
            FETCH_VERSION, index, high_watermark=900, last_stable_offset=900, log_start_offset=0, records=[records]
        )
        for index in range(partitions)
    ]
    topics = [(TOPIC, entries)] if entries else []
    return _framed(*map(bytes, encode_response(FETCH_VERSION, 1, topics)))


def share_request() -> bytes:
    head = build_request_header(ApiKey.SHARE_FETCH, SHARE_FETCH_VERSION, 1, "consumer-group-1-member-1")
    limits = INT32.pack(7) + INT32.pack(500) + INT32.pack(1) + INT32.pack(50 * MIB) + INT32.pack(500) + INT32.pack(500)
    return _framed(head, b"\x02g\x02m", limits, b"\x01\x01\x00")


def share_response(partitions: int, records_bytes: int) -> bytes:
    """A response without acquired records."""
    records = write_uvarint(records_bytes + 1) + bytes(records_bytes)
    entries = [INT32.pack(index) + bytes(15) + records + b"\x01\x00" for index in range(partitions)]
    head = build_response_header(ApiKey.SHARE_FETCH, SHARE_FETCH_VERSION, 1) + bytes(11)
    return _framed(head, b"\x02", TOPIC.bytes, write_uvarint(partitions + 1), *entries, b"\x00\x01\x00")


@dataclass(frozen=True, slots=True)
class Scenario:
    request: bytes
    response: bytes
    connections: int
    in_flight: int
    per_request: bool = False
    """Whether the figure is the CPU time of a request, not that of a GiB."""


SCENARIOS: Mapping[str, Callable[[], Scenario]] = {
    "produce-16k": lambda: Scenario(produce_request(16 * KIB), produce_response(), 1, 5),
    "produce-256k": lambda: Scenario(produce_request(256 * KIB), produce_response(), 1, 5),
    "consume-1": lambda: Scenario(fetch_request(), fetch_response(4, 900 * KIB), 1, 1),
    "consume-8": lambda: Scenario(fetch_request(), fetch_response(4, 900 * KIB), 8, 1),
    **{
        f"consume-100x{name}": partial(lambda size: Scenario(fetch_request(), fetch_response(100, size), 1, 1), size)
        for name, size in PARTITION_BYTES.items()
    },
    **{
        f"share-100x{name}": partial(lambda size: Scenario(share_request(), share_response(100, size), 1, 1), size)
        for name, size in PARTITION_BYTES.items()
    },
    "polls": lambda: Scenario(fetch_request(), fetch_response(0, 0), 1_000, 1, per_request=True),
    "round-trip": lambda: Scenario(produce_request(KIB), produce_response(), 1, 1, per_request=True),
}


class Peer:
    """One connection of the broker or of the client, without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.due = 0
        """The bytes of the current frame that are still to come."""
        self.head = b""
        self.unsent: list[tuple[int, int]] = []
        """Ranges of the file that could not be sent yet."""

    def frames_in(self, data: memoryview) -> int:
        """Returns how many frames end in `data`."""
        ended = pos = 0
        while pos < len(data):
            if self.due:
                passed = min(self.due, len(data) - pos)
                self.due -= passed
                pos += passed
                ended += not self.due
                continue
            taken = data[pos : pos + INT32.size - len(self.head)]
            self.head += taken
            pos += len(taken)
            if len(self.head) == INT32.size:
                self.due = INT32.unpack(self.head)[0]
                self.head = b""
        return ended


class Answers:
    """What a peer sends: one frame, from a file, as a broker sends records."""

    def __init__(self, frame: bytes) -> None:
        self.size = len(frame)
        self._frame = frame
        self._fd = os.memfd_create("answers")
        os.truncate(self._fd, self.size)
        os.pwrite(self._fd, frame, 0)

    def send(self, peer: Peer, count: int) -> bool:
        """Returns whether everything has left."""
        if not peer.unsent and self.size <= 64 * KIB:
            with contextlib.suppress(BlockingIOError):
                sent = peer.sock.send(self._frame * count)
                count -= sent // self.size
                if part := sent % self.size:
                    peer.unsent.append((part, self.size))
                    count -= 1
        peer.unsent += [(0, self.size)] * count
        while peer.unsent:
            start, end = peer.unsent[0]
            try:
                start += os.sendfile(peer.sock.fileno(), self._fd, start, end - start)
            except BlockingIOError:
                return False
            peer.unsent[0] = (start, end)
            if start == end:
                del peer.unsent[0]
        return True


class Exchanger:
    """Reads frames of many connections, and sends a frame for each while `left` lasts."""

    def __init__(self, frame: bytes, left: int | None) -> None:
        self.poll = select.epoll()
        self.peers: dict[int, Peer] = {}
        self.answers = Answers(frame)
        self.left = left
        self.buffer = memoryview(bytearray(MIB))
        self.received = 0
        self.on_frames: Callable[[int], None] = lambda _: None

    def add(self, sock: socket.socket) -> Peer:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        peer = self.peers[sock.fileno()] = Peer(sock)
        self.poll.register(sock.fileno(), select.EPOLLIN)
        return peer

    def send(self, peer: Peer, count: int) -> None:
        if self.left is not None:
            count = min(count, self.left)
            self.left -= count
        self._await(peer, self.answers.send(peer, count))

    def _await(self, peer: Peer, has_left: bool) -> None:
        self.poll.modify(peer.sock.fileno(), select.EPOLLIN | (0 if has_left else select.EPOLLOUT))

    def turn(self, timeout_s: float = 1.0) -> None:
        for fd, events in self.poll.poll(timeout_s):
            peer = self.peers.get(fd)
            if peer is None:
                continue
            if events & select.EPOLLOUT:
                self._await(peer, self.answers.send(peer, 0))
            if events & ~select.EPOLLOUT:
                self._read(peer)

    def _read(self, peer: Peer) -> None:
        try:
            size = peer.sock.recv_into(self.buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            del self.peers[peer.sock.fileno()]
            peer.sock.close()
            return
        ended = peer.frames_in(self.buffer[:size])
        self.received += ended
        if ended:
            self.on_frames(ended)
            self.send(peer, ended)


def serve_broker(port: int, name: str) -> None:
    """A broker that answers every request of the scenario at once."""
    exchanger = Exchanger(SCENARIOS[name]().response, None)
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        listener.setblocking(False)
        exchanger.poll.register(listener.fileno(), select.EPOLLIN)
        while True:
            with contextlib.suppress(BlockingIOError):
                exchanger.add(listener.accept()[0])
            exchanger.turn()


WAYS: Mapping[str, Callable[[], PipePool] | None] = {
    "tidegate": PipePool,
    "copying": lambda: PipePool(max_pipes=0),
    "by-the-loop": None,
}
"""How Tidegate relays: as the product does, without splices, and by the transports of the event loop."""


async def serve_relay(port: int, upstream: int, way: str) -> None:
    """Tidegate's own relay with the handlers of a proxy without a remote tier."""
    address = ("127.0.0.1", upstream)
    router = Router(pass_through_handlers(), {ApiKey.PRODUCE: ProduceHandler()})
    limits = LimitsConfig.model_validate({"max.connections": 0, "max.unauthenticated.connections.per.address": 0})
    async with ProxyServer(router, limits, ProxyMetrics(), make_pipes=WAYS[way]) as server:
        server.listen("127.0.0.1", port, BrokerEndpoint(1, lambda: [address], lambda _: address))
        await asyncio.Event().wait()


def exchange(port: int, scenario: Scenario, requests: int) -> list[float]:
    """Sends the requests, and returns the round trips, if one request is in flight at a time."""
    client = Exchanger(scenario.request, requests)
    trips: list[float] = []
    began = time.perf_counter()

    def note(_: int) -> None:
        nonlocal began
        now = time.perf_counter()
        trips.append(now - began)
        began = now

    if scenario.connections == scenario.in_flight == 1:
        client.on_frames = note
    for _ in range(scenario.connections):
        client.send(client.add(socket.create_connection(("127.0.0.1", port))), scenario.in_flight)
    deadline = time.monotonic() + IDLE_S
    while client.received < requests:
        client.turn()
        if time.monotonic() > deadline or not client.peers:
            raise TimeoutError(f"{client.received} of {requests} answers came")
    for peer in client.peers.values():
        peer.sock.close()
    return trips


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far, of all its threads, to the nanosecond."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL if "haproxy" in command[0] else None)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{command[0]} does not listen")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def start(command: Sequence[str], listen: int, upstream: int, stack: contextlib.ExitStack) -> int:
    """Starts a relay and returns its process id. `command` has {listen} and {upstream}, or is haproxy's alone."""
    if Path(command[0]).name == "haproxy":
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(folder) / "haproxy.cfg"
        config.write_text(HAPROXY.format(listen=listen, upstream=upstream, buffer=128 * KIB))
        command = [*command, "-f", str(config)]
    ports = {"{listen}": str(listen), "{upstream}": str(upstream)}
    return stack.enter_context(running([ports.get(word, word) for word in command], listen))


def compare(name: str, relays: Mapping[str, Sequence[str]], mib: int, rounds: int) -> None:
    """Prints a line for each relay."""
    scenario = SCENARIOS[name]()
    frame_bytes = max(len(scenario.request), len(scenario.response))
    requests = REQUESTS if scenario.per_request else max(1, mib * MIB // frame_bytes)
    per = requests / 1e6 if scenario.per_request else requests * frame_bytes / GIB
    unit = "us/request" if scenario.per_request else "CPU s/GiB"
    cpu: dict[str, list[float]] = {title: [] for title in relays}
    trips: dict[str, list[float]] = {title: [] for title in ("none", *relays)}
    with contextlib.ExitStack() as stack:
        upstream, *ports = free_ports(1 + len(relays))
        stack.enter_context(running((*_ourselves("broker"), str(upstream), name), upstream))
        listening = dict(zip(relays, ports, strict=True))
        pids = {title: start(relays[title], listening[title], upstream, stack) for title in relays}
        for port in ports:
            exchange(port, scenario, 4 * scenario.connections * scenario.in_flight)
        for _ in range(rounds):
            for title, port in listening.items():
                before = cpu_seconds(pids[title])
                trips[title] += exchange(port, scenario, requests)
                cpu[title].append((cpu_seconds(pids[title]) - before) / per)
            if scenario.connections == 1:
                trips["none"] += exchange(upstream, scenario, requests)
    floor = statistics.median(next(iter(cpu.values())))
    for title, found in cpu.items():
        median = statistics.median(found)
        line = f"{name:18}{title:14}{median:9.3f} ({min(found):.3f}-{max(found):.3f}) {unit} {median / floor:6.2f}x"
        print(line + (f"  {_trip(trips[title])}" if trips[title] and scenario.per_request else ""), flush=True)
    if trips["none"] and scenario.per_request:
        print(f"{name:18}{'none':14} {_trip(trips['none'])}", flush=True)


def _trip(trips_s: Sequence[float]) -> str:
    ordered = sorted(trips_s)
    return f"p50 {ordered[len(ordered) // 2] * 1e3:.3f} ms, p99 {ordered[len(ordered) * 99 // 100] * 1e3:.3f} ms"


def _ourselves(role: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench.micro_relay", "--as", role)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("scenarios", nargs="*", help=f"some of {', '.join(SCENARIOS)}")
    arguments.add_argument("--mib", type=int, default=256, help="how much one round moves")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--haproxy", default=shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin"))
    arguments.add_argument("--beside", action="append", default=[], metavar="NAME=COMMAND")
    arguments.add_argument("--as", dest="role", choices=("broker", "relay"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.role == "broker":
        serve_broker(int(given.scenarios[0]), given.scenarios[1])
    if given.role == "relay":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_relay(int(given.scenarios[0]), int(given.scenarios[1]), given.scenarios[2]))
    relays: dict[str, Sequence[str]] = {"haproxy": (given.haproxy,)} if given.haproxy else {}
    for beside in given.beside:
        title, _, command = beside.partition("=")
        relays[title] = shlex.split(command)
    relays |= {way: (*_ourselves("relay"), "{listen}", "{upstream}", way) for way in WAYS}
    for name in given.scenarios or SCENARIOS:
        compare(name, relays, given.mib, given.rounds)


if __name__ == "__main__":
    main()
