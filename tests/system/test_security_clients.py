"""Every client reads from both tiers of a topic, with every mechanism that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.support.rigs.security_clients import (
    SecuredJavaClient,
    Who,
    read_as_aiokafka,
    read_as_franz_go,
    read_as_kafka_python,
    read_as_librdkafka,
)
from tests.support.rigs.security_rig import READ, RECORD, RECORDS, HalfTrimmed, half_trimmed
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.secure_kafka import MECHANISMS, allow
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

Read = Callable[[str, str, int, int, Who], list[RECORD]]
AROUND_THE_SEAM = 200
CLIENTS: dict[str, Read | None] = {
    "kafka-python": read_as_kafka_python,
    "aiokafka": read_as_aiokafka,
    "confluent-kafka": read_as_librdkafka,
    "franz-go": read_as_franz_go,
    "java": None,
}


class Both(NamedTuple):
    """A half-trimmed topic behind each of the proxies."""

    plain: HalfTrimmed
    encrypted: HalfTrimmed


@pytest.fixture(scope="module")
def topics(secured: KafkaCluster, plain: TidegateProcess, encrypted: TidegateProcess) -> Both:
    both = Both(half_trimmed(secured, "tiered-by-clients"), half_trimmed(secured, "sealed-by-clients"))
    for topic in both:
        allow(secured, "alice", topic.topic, READ)
    return both


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredJavaClient]:
    client = SecuredJavaClient(tmp_path_factory.mktemp("java"))
    yield client
    client.stop()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_reads_across_the_seam(
    name: str,
    mechanism: str,
    topics: Both,
    java: SecuredJavaClient,
    plain: TidegateProcess,
    encrypted: TidegateProcess,
    authority: Authority,
) -> None:
    read = CLIENTS[name] or java.read
    for proxy, topic, ca in ((plain, topics.plain, None), (encrypted, topics.encrypted, authority.ca)):
        first = topic.local_log_start - AROUND_THE_SEAM
        expected = list(enumerate(topic.values))[first : first + 2 * AROUND_THE_SEAM]
        found = read(proxy.bootstrap_servers, topic.topic, first, len(expected), Who("alice", mechanism, ca))
        assert found == expected
        assert 0 < first < first + len(expected) < RECORDS
