"""A relay before a real S3 server that gives it the first-byte delay and the rate per connection of a modelled store.

It runs as a process of its own, with two threads for each connection. `os.splice` moves the bytes of the answers, so
they never enter Python. `python -m bench.store_model` measures what the relay costs and how exactly it keeps the model.

A request begins with the first bytes that a client sends after the last bytes of an answer. S3 clients do not send a
request before they have the answer to the previous one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from bench.rig.relay_process import RelayProcess
from bench.rig.store_model import MODELS, Pace, StoreModel
from tests.support.servers.ports import free_ports

PIECE_BYTES = 256 << 10
F_SETPIPE_SZ = 1031
SHORTEST_SLEEP_S = 0.0002
"""A shorter wait would cost more than it models."""


class ModelledStore(RelayProcess):
    """Runs the relay before the server at `target_port`. `endpoint_url` is its own address."""

    def __init__(self, target_port: int, model: StoreModel) -> None:
        (port,) = free_ports(1)
        super().__init__(f"the modelled store {model.name}", [port])
        self.model = model
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self._arguments = [model.name, str(port), str(target_port)]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bench.rig.modelled_store", *self._arguments]


class _Connection:
    """One client connection and its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket, model: StoreModel) -> None:
        self._client = client
        self._server = server
        self._model = model
        self._is_answered = True
        """Whether the next bytes of the client begin a request."""
        self._earliest_s = 0.0
        """The answer may not begin before this time."""
        self._open_directions = 2
        self._lock = threading.Lock()

    def run(self) -> None:
        for one in (self._client, self._server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for direction in (self._pass_requests, self._pass_answers):
            threading.Thread(target=self._until_closed, args=(direction,), daemon=True).start()

    def _until_closed(self, direction: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            direction()
        for one in (self._client, self._server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open_directions -= 1
            if not self._open_directions:
                self._client.close()
                self._server.close()

    def _pass_requests(self) -> None:
        pace = Pace(self._model.bytes_per_s)
        buffer = memoryview(bytearray(PIECE_BYTES))
        while count := self._client.recv_into(buffer):
            now_s = time.monotonic()
            if self._is_answered:
                self._is_answered = False
                if bytes(buffer[:4]) == b"GET ":
                    self._earliest_s = now_s + self._model.first_byte_ms / 1000
            _sleep_until(pace.passed_at(now_s, count))
            self._server.sendall(buffer[:count])

    def _pass_answers(self) -> None:
        pace = Pace(self._model.bytes_per_s)
        taken, given = os.pipe()
        try:
            fcntl.fcntl(given, F_SETPIPE_SZ, PIECE_BYTES)
            while count := os.splice(self._server.fileno(), given, PIECE_BYTES):
                _sleep_until(self._earliest_s)
                _sleep_until(pace.passed_at(time.monotonic(), count))
                self._is_answered = True
                while count:
                    count -= os.splice(taken, self._client.fileno(), count)
        finally:
            os.close(taken)
            os.close(given)


def _sleep_until(at_s: float) -> None:
    if (left_s := at_s - time.monotonic()) > SHORTEST_SLEEP_S:
        time.sleep(left_s)


def serve(model: StoreModel, port: int, target_port: int) -> None:
    """Relays connections until the process ends."""
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", target_port))
            except OSError:
                client.close()
                continue
            _Connection(client, server, model).run()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", choices=sorted(MODELS))
    arguments.add_argument("port", type=int)
    arguments.add_argument("target_port", type=int)
    given = arguments.parse_args()
    serve(MODELS[given.model], given.port, given.target_port)


if __name__ == "__main__":
    main()
