"""Sends one-record Produce requests, and waits for each answer. The requests are encoded once, by kafka-python."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping

from kafka.protocol.producer import ProduceRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

VERSION = 9
TIMEOUT_S = 60.0
VALUE = b"x" * 100
WARM_UP = 50


def produce_request(topic: str) -> bytes:
    """Returns the frame of a request that writes one record to partition 0, with acks=1."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    builder.append(offset=0, timestamp=int(time.time() * 1000), key=None, value=VALUE, headers=[])
    data = ProduceRequest.TopicProduceData
    one = data.PartitionProduceData(version=VERSION, index=0, records=bytes(builder.build()))
    message = ProduceRequest(
        version=VERSION,
        transactional_id=None,
        acks=1,
        timeout_ms=30_000,
        topic_data=[data(version=VERSION, name=topic, partition_data=[one])],
    )
    message.API_VERSION = VERSION
    message.with_header(correlation_id=1, client_id="round-trips")
    return bytes(message.encode(header=True, framed=True))


def round_trips(ports: Mapping[str, int], topic: str, count: int) -> dict[str, list[float]]:
    """Returns the milliseconds of `count` round trips to each port. The ports take turns, one round trip each.

    So whatever else the machine does meets all of them alike."""
    frame = produce_request(topic)
    samples: dict[str, list[float]] = {name: [] for name in ports}
    connections = {name: socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for name, port in ports.items()}
    try:
        for connection in connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(WARM_UP + count):
            for name, connection in connections.items():
                began = time.perf_counter()
                connection.sendall(frame)
                answer = _answer(connection)
                took_ms = (time.perf_counter() - began) * 1000
                if (error := error_of(answer, topic)) != 0:
                    raise RuntimeError(f"{name} answered error {error} to a Produce request")
                if number >= WARM_UP:
                    samples[name].append(took_ms)
    finally:
        for connection in connections.values():
            connection.close()
    return samples


def _answer(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4]):
        if not (piece := connection.recv(1 << 16)):
            raise RuntimeError("the server closed the connection")
        data += piece
    return data[4:]


def error_of(answer: bytes, topic: str) -> int:
    """Returns the error code of the only partition: behind the header, two array lengths, the name and the index."""
    (error,) = struct.unpack_from(">h", answer, 4 + 1 + 1 + 1 + len(topic) + 1 + 4)
    return int(error)
