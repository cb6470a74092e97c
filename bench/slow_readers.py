"""Measures a consumer of the remote tier alone, beside 20 slow readers, and beside 20 clients that never read.

Run `python -m bench.slow_readers [rounds]`. A slow reader asks for 50 MiB, leaves the answer unread while it works for
two seconds, then reads it and asks again. A client that never reads leaves its first answer unread. In each round, the
same consumer reads alone, beside the ones, and beside the others. So a ratio compares rates of one round.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from kafka.protocol.consumer import FetchRequest

from bench.clients.java_tools import MIB, JavaTools
from bench.demo_producer import create_topic
from bench.ending import run
from bench.offsets import EARLIEST, LATEST, list_offsets
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

TOPIC = "bench-remote"
PARTITIONS = 4
SIZE_MIB = 256
MOVED = 0.75
MOVE_TIMEOUT_S = 120.0
ROUNDS = 3
READERS = 20
WORK_S = 2.0
WINDOW_S = 4.0
TIMEOUT_S = 60.0
FETCH_VERSION = 12
MAX_BYTES = 50 * MIB
"""The default of the Java consumer's fetch.max.bytes."""
RECEIVE_BUFFER_BYTES = 64 * 1024
"""The default of the Java consumer's receive.buffer.bytes."""
BROKER_SETTINGS = {
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}
CONSUMERS: Mapping[str, Mapping[str, int]] = {
    "1 MiB a partition": {"max.partition.fetch.bytes": MIB},
    "50 MiB a partition": {"max.partition.fetch.bytes": MAX_BYTES, "receive.message.max.bytes": 2 * MAX_BYTES},
}
STARTS = list[int]
"""The first local offset of each partition. The offsets below it are in the remote tier alone."""


def fetch_of(partition: int, offset: int) -> bytes:
    topic = FetchRequest.FetchTopic
    asked = topic.FetchPartition(
        version=FETCH_VERSION, partition=partition, fetch_offset=offset, partition_max_bytes=MAX_BYTES
    )
    message = FetchRequest(
        version=FETCH_VERSION,
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=MAX_BYTES,
        isolation_level=0,
        topics=[topic(version=FETCH_VERSION, topic=TOPIC, partitions=[asked])],
    )
    message.API_VERSION = FETCH_VERSION
    message.with_header(correlation_id=1, client_id="slow")
    return bytes(message.encode(header=True, framed=True))


def receive(client: socket.socket, count: int) -> int:
    """Receives `count` bytes, and returns the number of the first four."""
    first = b""
    while count:
        data = client.recv(min(count, MIB))
        if not data:
            raise RuntimeError("the proxy closed the connection of a slow reader")
        count -= len(data)
        first = first or data[:4]
    return int.from_bytes(first)


def read_slowly(pipe: Connection, address: tuple[str, int], starts: STARTS, ever_reads: bool) -> None:
    """Runs the readers until the pipe says that they end. Sends how many bytes each answer had, on average."""
    received: list[int] = []
    is_over = threading.Event()
    asked = threading.Barrier(READERS + 1)

    def one(number: int) -> None:
        rnd = random.Random(number)
        partition = number % PARTITIONS
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            client.settimeout(TIMEOUT_S)
            client.connect(address)
            client.sendall(fetch_of(partition, rnd.randrange(starts[partition] // 2)))
            asked.wait()
            while not is_over.wait(WORK_S * rnd.uniform(0.75, 1.25)):
                if ever_reads:
                    size = receive(client, 4)
                    receive(client, size)
                    received.append(size)
                    client.sendall(fetch_of(partition, rnd.randrange(starts[partition] // 2)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    asked.wait()
    time.sleep(WORK_S)  # every one of them has its first answer, unread
    pipe.send(None)
    pipe.recv()
    is_over.set()
    for thread in threads:
        thread.join()
    pipe.send(statistics.mean(received) if received else 0.0)


@contextlib.contextmanager
def readers(proxy: TidegateProcess, starts: STARTS, *, ever_reads: bool) -> Iterator[list[float]]:
    """Yields a list that has the mean size of their answers afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A node's port, since the bootstrap port serves no Fetch in Kafka's clients.
    address = proxy.address[0], proxy.address[1] + 1
    process = context.Process(target=read_slowly, args=(theirs, address, starts, ever_reads))
    process.start()
    sizes: list[float] = []
    try:
        ours.recv()
        yield sizes
    finally:
        ours.send(None)
        sizes.append(ours.recv())
        process.join()


def rate(proxy: TidegateProcess, starts: STARTS, settings: Mapping[str, int]) -> float:
    """Returns the MiB a second of a consumer that reads the remote tier again and again, from its first record on."""
    consumer = Consumer(
        {
            "bootstrap.servers": proxy.bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.max.bytes": MAX_BYTES,
            "queued.max.messages.kbytes": 128 * 1024,
            "log_level": 3,
            **settings,
        }
    )
    consumed, began, left = 0, 0.0, 0

    def rewind() -> int:
        consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
        return sum(starts)

    try:
        deadline = time.perf_counter() + TIMEOUT_S
        while not began or time.perf_counter() < began + WINDOW_S:
            if time.perf_counter() > deadline:
                raise RuntimeError("the consumer was not served")
            if left <= 0:
                left = rewind()
            messages = consumer.consume(10_000, 0.1)
            if any(message.error() for message in messages):
                raise RuntimeError(str(messages[0].error()))
            left -= len(messages)
            if began:
                consumed += sum(len(message.value() or b"") for message in messages)
            elif messages:
                began = time.perf_counter()
        return consumed / MIB / (time.perf_counter() - began)
    finally:
        consumer.close()


def moved(cluster: KafkaCluster) -> STARTS:
    """Waits until most records have left the broker."""
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while True:
        partitions = range(PARTITIONS)
        starts = list_offsets(cluster.address(), TOPIC, partitions, EARLIEST)
        ends = list_offsets(cluster.address(), TOPIC, partitions, LATEST)
        if min(starts[each] / max(1, ends[each]) for each in partitions) >= MOVED:
            return [starts[each] for each in partitions]
        if time.monotonic() > deadline:
            raise TimeoutError("the records do not leave the broker")
        time.sleep(0.5)


def measure(proxy: TidegateProcess, starts: STARTS, rounds: int) -> None:
    for name, settings in CONSUMERS.items():
        alone: list[float] = []
        beside: dict[bool, list[float]] = {True: [], False: []}
        sizes: list[float] = []
        for _ in range(rounds):
            alone.append(rate(proxy, starts, settings))
            for ever_reads in (True, False):
                with readers(proxy, starts, ever_reads=ever_reads) as their_sizes:
                    beside[ever_reads].append(rate(proxy, starts, settings))
                if ever_reads:
                    sizes += their_sizes
        print(f"\nA consumer of {name}; the answers of the slow readers have {statistics.mean(sizes) / MIB:.1f} MiB\n")
        print("| | alone MiB/s | slow readers | ratio | never read | ratio |\n|---|---|---|---|---|---|")
        for number, solo in enumerate(alone):
            slow, never = beside[True][number], beside[False][number]
            print(
                f"| round {number + 1} | {solo:.0f} | {slow:.0f} | {slow / solo:.2f} | {never:.0f} "
                f"| {never / solo:.2f} |",
                flush=True,
            )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as home, KafkaCluster(settings=BROKER_SETTINGS) as cluster:
        segment_bytes = SIZE_MIB * MIB // PARTITIONS // 16
        create_topic(cluster.bootstrap_servers, TOPIC, PARTITIONS, {"segment.bytes": str(segment_bytes)})
        java = JavaTools()
        java.produce(cluster.bootstrap_servers, TOPIC, SIZE_MIB)
        java.stop()
        with tidegate_over(cluster, Path(home), tiered=[TOPIC], segment_bytes=segment_bytes) as proxy:
            measure(proxy, moved(cluster), rounds)


if __name__ == "__main__":
    run(main)
