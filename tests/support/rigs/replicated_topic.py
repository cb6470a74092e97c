"""A topic with two replicas. The replica that is behind may become the leader."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import topic_id_of

LEADER, FOLLOWER = 1, 2


def create_replicated_topic(cluster: KafkaCluster, topic: str) -> None:
    config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    new = NewTopic(topic, num_partitions=1, replica_assignment=[[LEADER, FOLLOWER]], config=config)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([new])[topic].result(TIMEOUT_S)
    topic_id_of(cluster.bootstrap_servers, topic)


def until_in_sync(cluster: KafkaCluster, topic: str) -> None:
    """Waits until both replicas are in sync. A replica that was paused must have all records before the other stops."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    until(lambda: {*admin.list_topics(topic, TIMEOUT_S).topics[topic].partitions[0].isrs} == {LEADER, FOLLOWER})
