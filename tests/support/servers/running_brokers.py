"""Asks one broker which brokers the cluster has now. It sends ApiVersions and Metadata in hand-written bytes."""

from __future__ import annotations

import socket
import struct


def running_brokers(host: str, port: int, timeout_s: float = 2.0) -> dict[int, tuple[str, int]]:
    """Returns the addresses by node id in a broker's Metadata. Raises OSError while the broker does not answer."""
    with socket.create_connection((host, port), timeout=timeout_s) as peer:
        _call(peer, api_key=18, version=0, body=b"")
        # Metadata v1 for no topics. The answer has brokers (node id, host, port, rack), the controller id, and topics.
        answer = _call(peer, api_key=3, version=1, body=struct.pack(">i", 0))
    (count,) = struct.unpack_from(">i", answer)
    at, brokers = 4, {}
    for _ in range(count):
        node_id, length = struct.unpack_from(">ih", answer, at)
        name = answer[at + 6 : at + 6 + length].decode()
        broker_port, rack = struct.unpack_from(">ih", answer, at + 6 + length)
        at += 6 + length + 6 + max(rack, 0)
        brokers[node_id] = (name, broker_port)
    return brokers


def _call(peer: socket.socket, *, api_key: int, version: int, body: bytes) -> bytes:
    header = struct.pack(">hhih", api_key, version, 0, -1)
    peer.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
    (length,) = struct.unpack(">i", _receive(peer, 4))
    return _receive(peer, length)[4:]


def _receive(peer: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (piece := peer.recv(length - len(data))):
            raise ConnectionResetError("the broker closed the connection")
        data += piece
    return bytes(data)
