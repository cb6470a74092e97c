"""Opens many connections in a process of its own, which are idle or poll a topic without new records.

The first line of the output has the time when all connections were answered. With polls, each later line has the time
and the polls that were answered so far.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import time
from typing import cast

import uvloop
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest

from bench.clients.lines import LineProcess, exit_when_stdin_closes

FETCH_VERSION = 12
API_VERSIONS_VERSION = 2
POLL_MAX_WAIT_MS = 500
AT_ONCE = 100
REPORT_S = 0.2
TIMEOUT_S = 60.0
SESSION_ID_AT = 4 + 1 + 4 + 2
"""Behind the correlation id, the tags of the header, the throttle time and the error code."""


class ManyConnections(LineProcess):
    """A context manager. `polled` is a topic and its number of partitions, or None for idle connections."""

    def __init__(self, port: int, count: int, polled: tuple[str, int] | None = None) -> None:
        topic, partitions = polled or ("", 0)
        super().__init__("bench.clients.many_connections", [str(port), str(count), topic or "-", str(partitions)])


def api_versions_request() -> bytes:
    message = ApiVersionsRequest(version=API_VERSIONS_VERSION)
    message.API_VERSION = API_VERSIONS_VERSION
    message.with_header(correlation_id=1, client_id="many")
    return bytes(message.encode(header=True, framed=True))


def fetch_request(topic: str, partitions: int, session_id: int, session_epoch: int) -> bytes:
    """Returns a request of a fetch session. The first has all partitions, the later ones have none (KIP-227)."""
    asked = FetchRequest.FetchTopic
    topics = []
    if session_epoch == 0:
        each = [
            asked.FetchPartition(version=FETCH_VERSION, partition=one, fetch_offset=0, partition_max_bytes=1 << 20)
            for one in range(partitions)
        ]
        topics = [asked(version=FETCH_VERSION, topic=topic, partitions=each)]
    message = FetchRequest(
        version=FETCH_VERSION,
        max_wait_ms=POLL_MAX_WAIT_MS,
        min_bytes=1,
        max_bytes=50 << 20,
        isolation_level=0,
        session_id=session_id,
        session_epoch=session_epoch,
        topics=topics,
    )
    message.API_VERSION = FETCH_VERSION
    message.with_header(correlation_id=1, client_id="many")
    return bytes(message.encode(header=True, framed=True))


class _Client(asyncio.Protocol):
    """Sends a request, and gives each answer to whoever waits for it."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have no such base class

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) >= 4 and len(self._data) >= 4 + int.from_bytes(self._data[:4]):
            answer, self._data = self._data[4:], b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            return await self._answer


class _Crowd:
    def __init__(self, port: int, count: int, topic: str, partitions: int) -> None:
        self._port = port
        self._count = count
        self._topic = topic
        self._partitions = partitions
        self._polls = 0
        self._opening = asyncio.Semaphore(AT_ONCE)
        self._open = 0
        self._all_open = asyncio.Event()

    async def run(self) -> None:
        """Runs until the process ends."""
        exit_when_stdin_closes()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._count):
                group.create_task(self._one())
            await self._all_open.wait()
            print(f"{time.monotonic():.6f} {self._polls}", flush=True)
            while self._partitions:
                await asyncio.sleep(REPORT_S)
                print(f"{time.monotonic():.6f} {self._polls}", flush=True)

    async def _one(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._opening:
            _, client = await loop.create_connection(_Client, "127.0.0.1", self._port)
            await client.ask(api_versions_request())
            session_id = session_epoch = 0
            if self._partitions:
                session_id = await self._poll(client, 0, 0)
                session_epoch = int(session_id != 0)
            self._open += 1
            if self._open == self._count:
                self._all_open.set()
        while self._partitions:
            answered = await self._poll(client, session_id, session_epoch)
            self._polls += 1
            # A server that keeps no session answers with session 0, and gets all partitions every time.
            session_epoch = session_epoch + 1 if answered else 0
            session_id = answered
        await asyncio.Event().wait()

    async def _poll(self, client: _Client, session_id: int, session_epoch: int) -> int:
        answer = await client.ask(fetch_request(self._topic, self._partitions, session_id, session_epoch))
        error, answered = struct.unpack_from(">hi", answer, SESSION_ID_AT - 2)
        if error:
            sys.exit(f"a poll was answered with error {error}")
        return int(answered)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("port", type=int)
    arguments.add_argument("count", type=int)
    arguments.add_argument("topic")
    arguments.add_argument("partitions", type=int)
    given = arguments.parse_args()
    uvloop.run(_Crowd(given.port, given.count, given.topic, given.partitions).run())


if __name__ == "__main__":
    main()
