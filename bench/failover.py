"""Measures the failover of producers when one of three brokers is killed, through Tidegate and direct.

Run `python -m bench.failover [rounds]`. In each round, four producers with acks=all write to one partition: librdkafka
and the Java client, each direct and through Tidegate. Then the partition's leader gets SIGKILL. The failover time of a
producer is the longest time between two acknowledgements around that. All four share the same broker's death, so the
cluster's own time for the election is the same for all.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.support.rigs.steady_producers import Acknowledgements, java, librdkafka
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import tidegate_over

TOPIC = "failover"
STEADY_S = 5.0
AFTER_KILL_S = 25.0
START_TIMEOUT_S = 60.0
SESSION_TIMEOUT_MS = 3_000
"""A cluster fences a killed broker after this time. The default, 9 s, would only add to every figure."""


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
            stack.enter_context(kinds[kind](ways[way], TOPIC, acknowledged))
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
