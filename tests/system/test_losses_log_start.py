"""A recorded log start of one history says nothing about another one: a broker lost its disk, or was behind.

These topics are never trimmed, so any move of a broker's log start deletes records."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from tests.support.rigs.loss_rig import Site, leader_behind, numbered, records_from
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.replicated_topic import FOLLOWER, LEADER, create_replicated_topic, until_in_sync
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

DELETED = 500
KEEPS_ALL_BYTES = 1 << 40
WITNESSED = 50


class Witness:
    """A second topic. When the tasks have copied all of it, they have also had turns at the topic under test."""

    def __init__(self, site: Site, name: str, replicas: int = 1) -> None:
        self._site, self._name, self._count = site, name, 0
        create_topic(site.cluster.bootstrap_servers, name, replicas=replicas)

    def until_tasks_had_their_turns(self) -> None:
        produce(self._site.cluster.bootstrap_servers, self._name, random_values(WITNESSED))
        self._count += WITNESSED
        until(lambda: self._site.is_remote_up_to(self._count - 1, self._name))


def begins(site: Site, proxy: TidegateProcess, node_id: int = 1) -> tuple[int, int]:
    """Returns the log start for clients of the broker, and for clients of the proxy."""
    return site.local_log_start(), site.until_earliest(leader_behind(proxy, node_id))


def test_a_broker_that_lost_its_disk_keeps_its_new_records(topic_name: str, tmp_path: Path) -> None:
    topic, beside = topic_name, f"{topic_name}-beside"
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site = Site(broker, tmp_path, topic, witness=beside, local_retention_bytes=KEEPS_ALL_BYTES)
        create_topic(broker.bootstrap_servers, topic)
        witness = Witness(site, beside)
        with site.proxy() as proxy:
            produce(proxy.bootstrap_servers, topic, random_values(DELETED))
            assert delete_records(proxy.bootstrap_servers, topic, DELETED) == DELETED
            witness.until_tasks_had_their_turns()
            assert begins(site, proxy) == (DELETED, DELETED)

            broker.stop_broker(1)
            shutil.rmtree(broker.log_folder(topic, 0))
            broker.start_broker(1)
            below, beyond = random_values(300), random_values(700)
            produce(proxy.bootstrap_servers, topic, below)
            witness.until_tasks_had_their_turns()
            found_below = begins(site, proxy)
            produce(proxy.bootstrap_servers, topic, beyond)
            witness.until_tasks_had_their_turns()
            assert (found_below, begins(site, proxy)) == ((0, 0), (0, 0))
            assert records_from(proxy.bootstrap_servers, topic, 0, 1000) == numbered(below + beyond)

            # A user's deletion in the new history is valid, even at a low offset.
            assert delete_records(proxy.bootstrap_servers, topic, 50) == 50
            witness.until_tasks_had_their_turns()
            assert begins(site, proxy) == (50, 50)
            assert site.fetch_error(leader_behind(proxy), 49) == ErrorCode.OFFSET_OUT_OF_RANGE
            assert records_from(proxy.bootstrap_servers, topic, 50, 950) == numbered(below + beyond)[50:]


def test_a_leader_that_was_behind_keeps_what_replaces_deleted_records(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """No history is in the remote tier. Only the recorded log start tells anything about the lost one."""
    cluster, topic, beside = kafka_of_three, topic_name, f"{topic_name}-beside"
    site = Site(cluster, tmp_path, topic, witness=beside, local_retention_bytes=KEEPS_ALL_BYTES, copied_soon=False)
    create_replicated_topic(cluster, topic)
    witness = Witness(site, beside, replicas=3)
    shared, lost, replacing = random_values(300), random_values(300), random_values(600)
    with site.proxy() as proxy:
        produce(proxy.bootstrap_servers, topic, shared)
        until_in_sync(cluster, topic)
        cluster.stop_broker(FOLLOWER)
        try:
            produce(proxy.bootstrap_servers, topic, lost)
            assert delete_records(proxy.bootstrap_servers, topic, DELETED) == DELETED
            witness.until_tasks_had_their_turns()
            assert begins(site, proxy, LEADER) == (DELETED, DELETED)
            cluster.kill_broker(LEADER)
        finally:
            cluster.start_broker(FOLLOWER)
        try:
            produce(proxy.bootstrap_servers, topic, replacing)
            witness.until_tasks_had_their_turns()
            assert begins(site, proxy, FOLLOWER) == (0, 0)
            assert records_from(proxy.bootstrap_servers, topic, 0, 900) == numbered(shared + replacing)
        finally:
            cluster.start_broker(LEADER)
