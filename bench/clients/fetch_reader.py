"""Fetches the same records of all partitions of a topic again and again, without a look at them.

So it takes less time than any other client, and the rate is that of what answers it. Each line of the output has two
numbers: the time (`time.monotonic`), and the bytes of the answers so far.
"""

from __future__ import annotations

import argparse
import socket
import struct
import time
from typing import NoReturn

from kafka.protocol.consumer import FetchRequest

from bench.clients.lines import LineProcess, exit_when_stdin_closes

VERSION = 12
REPORT_S = 0.1
BUFFER_BYTES = 1 << 20
TIMEOUT_S = 60.0
SESSIONLESS = -1


class FetchReader(LineProcess):
    """A context manager that runs the reader. It asks for `partition_bytes` of each partition."""

    def __init__(self, port: int, topic: str, partitions: int, partition_bytes: int) -> None:
        super().__init__("bench.clients.fetch_reader", [str(port), topic, str(partitions), str(partition_bytes)])


def request(topic: str, partitions: int, partition_bytes: int) -> bytes:
    asked = FetchRequest.FetchTopic
    each = [
        asked.FetchPartition(version=VERSION, partition=one, fetch_offset=0, partition_max_bytes=partition_bytes)
        for one in range(partitions)
    ]
    message = FetchRequest(
        version=VERSION,
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=partitions * partition_bytes,
        isolation_level=0,
        session_id=0,
        session_epoch=SESSIONLESS,
        topics=[asked(version=VERSION, topic=topic, partitions=each)],
    )
    message.API_VERSION = VERSION
    message.with_header(correlation_id=1, client_id="bench")
    return bytes(message.encode(header=True, framed=True))


def read(port: int, asked: bytes) -> NoReturn:
    exit_when_stdin_closes()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    total, reported_at = 0, 0.0
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as peer:
        while True:
            peer.sendall(asked)
            _receive(peer, buffer[:4])
            (left,) = struct.unpack_from(">i", buffer)
            total += left
            while left:
                left -= _receive(peer, buffer[:left])
            now = time.monotonic()
            if now - reported_at >= REPORT_S:
                reported_at = now
                print(f"{now:.6f} {total}", flush=True)


def _receive(peer: socket.socket, room: memoryview) -> int:
    """Fills the room, and returns its size."""
    left = room
    while left:
        count = peer.recv_into(left)
        if not count:
            raise ConnectionError("the server closed the connection")
        left = left[count:]
    return len(room)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("port", type=int)
    arguments.add_argument("topic")
    arguments.add_argument("partitions", type=int)
    arguments.add_argument("partition_bytes", type=int)
    given = arguments.parse_args()
    read(given.port, request(given.topic, given.partitions, given.partition_bytes))


if __name__ == "__main__":
    main()
