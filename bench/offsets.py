"""Asks a server for a topic's offsets without a client library, which would hide or cache some of them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

EARLIEST = -2
LATEST = -1
LATEST_TIERED = -5
EARLIEST_LOCAL = -4


def list_offsets(
    address: tuple[str, int], topic: str, partitions: Sequence[int], timestamp: int, timeout_s: float = 60.0
) -> dict[int, int]:
    """Sends ListOffsets v9, and returns the offsets by partition. -1 means that there is no such offset.

    Partitions with an error are missing from the result."""
    name = topic.encode()
    request = bytearray(struct.pack(">hhihx", 2, 9, 0, -1))
    request += struct.pack(">ibBB", -1, 0, 2, len(name) + 1) + name + bytes([len(partitions) + 1])
    for partition in partitions:
        request += struct.pack(">iiqx", partition, -1, timestamp)
    request += b"\0\0"
    with socket.create_connection(address, timeout=timeout_s) as peer, peer.makefile("rb") as answers:
        peer.sendall(struct.pack(">i", len(request)) + request)
        (length,) = struct.unpack(">i", answers.read(4))
        answer = answers.read(length)
    # correlation id, header tags, throttle time, one topic, its name, its partitions
    at = 4 + 1 + 4 + 1 + 1 + len(name)
    count = answer[at] - 1
    at += 1
    offsets: dict[int, int] = {}
    for _ in range(count):
        partition, error, _, offset, _ = struct.unpack_from(">ihqqix", answer, at)
        at += struct.calcsize(">ihqqix")
        if error == 0:
            offsets[partition] = offset
    return offsets
