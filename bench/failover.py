"""Measures the failover of producers when one of three brokers is killed, through Tidegate and direct.

Run `python -m bench.failover [rounds]`. In each round, four producers with acks=all write to one partition: librdkafka
and the Java client, each direct and through Tidegate. Then the partition's leader gets SIGKILL. The failover time of a
producer is the longest time between two acknowledgements around that. All four share the same broker's death, so the
cluster's own time for the election is the same for all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient

from tests.support.servers.kafka import KafkaCluster, java_command
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import tidegate_over

VERIFIABLE_PRODUCER = "org.apache.kafka.tools.VerifiableProducer"
TOPIC = "failover"
INTERVAL_S = 0.01
STEADY_S = 5.0
AFTER_KILL_S = 25.0
START_TIMEOUT_S = 60.0
SESSION_TIMEOUT_MS = 3_000
"""A cluster fences a killed broker after this time. The default, 9 s, would only add to every figure."""


class Acknowledgements:
    """The times of a producer's acknowledgements, by the monotonic clock in seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self._times: list[float] = []

    def note(self) -> None:
        self._times.append(time.monotonic())

    def __len__(self) -> int:
        return len(self._times)

    def longest_pause(self, begin: float) -> float:
        """Returns the longest pause that ended after `begin`, in seconds. The last one may not have ended yet."""
        times = [each for each in self._times if each >= begin - 1] + [time.monotonic()]
        return max((later - earlier for earlier, later in pairwise(times)), default=float("inf"))


@contextmanager
def librdkafka(bootstrap: str, acknowledged: Acknowledgements) -> Iterator[None]:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "log_level": 3})
    stopped = threading.Event()

    def heard(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.note()
        else:
            acknowledged.errors += 1

    def produce() -> None:
        while not stopped.is_set():
            producer.produce(TOPIC, b"x" * 100, partition=0, on_delivery=heard)
            producer.poll(INTERVAL_S)
        producer.flush(START_TIMEOUT_S)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def java(bootstrap: str, acknowledged: Acknowledgements) -> Iterator[None]:
    rate = str(round(1 / INTERVAL_S))
    command = java_command(VERIFIABLE_PRODUCER, heap_mib=128, log_level="ERROR")
    process = subprocess.Popen(
        [*command, "--bootstrap-server", bootstrap, "--topic", TOPIC, "--throughput", rate, "--acks", "-1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)["name"]
            if event == "producer_send_success":
                acknowledged.note()
            elif event == "producer_send_error":
                acknowledged.errors += 1

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        thread.join()


def leader_and_replicas(cluster: KafkaCluster) -> tuple[int, int]:
    """Returns the leader of the partition, and the number of its in-sync replicas."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 3})
    partition = admin.list_topics(TOPIC, timeout=START_TIMEOUT_S).topics[TOPIC].partitions[0]
    return int(partition.leader), len(partition.isrs)


def until_in_sync(cluster: KafkaCluster) -> int:
    """Returns the leader, once all replicas are in sync."""
    while True:
        leader, in_sync = leader_and_replicas(cluster)
        if leader > 0 and in_sync == len(cluster.brokers):
            return leader
        time.sleep(0.5)


def one_round(cluster: KafkaCluster, proxy: str) -> list[Acknowledgements]:
    leader = until_in_sync(cluster)
    kinds = {"librdkafka": librdkafka, "Java": java}
    ways = {"direct": cluster.bootstrap_servers, "Tidegate": proxy}
    producers = {(kind, way): Acknowledgements(f"{kind}, {way}") for kind in kinds for way in ways}
    with ExitStack() as stack:
        for (kind, way), acknowledged in producers.items():
            stack.enter_context(kinds[kind](ways[way], acknowledged))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(len(each) > 10 for each in producers.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(STEADY_S)
        killed_at = time.monotonic()
        cluster.kill_broker(leader)
        time.sleep(AFTER_KILL_S)
        pauses = {each: each.longest_pause(killed_at) for each in producers.values()}
    cluster.start_broker(leader)
    for acknowledged, pause_s in pauses.items():
        print(f"| {acknowledged.name} | {pause_s:.2f} | {len(acknowledged)} | {acknowledged.errors} |", flush=True)
    return list(producers.values())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    settings = {"broker.session.timeout.ms": str(SESSION_TIMEOUT_MS), "broker.heartbeat.interval.ms": "500"}
    with tempfile.TemporaryDirectory() as home, KafkaCluster(brokers=3, settings=settings) as cluster:
        create_topic(cluster.bootstrap_servers, TOPIC, replicas=3)
        with tidegate_over(cluster, Path(home)) as proxy:
            for number in range(1, rounds + 1):
                print(f"\nround {number}\n\n| producer | failover s | acknowledged | errors |\n|---|---|---|---|")
                one_round(cluster, proxy.bootstrap_servers)


if __name__ == "__main__":
    main()
