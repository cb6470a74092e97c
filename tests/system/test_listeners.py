"""Two kinds of listeners at once: one port per broker in plain text, and one port for all brokers by SNI.

The names of the brokers are no names of this machine. Java and kafka-python get a hosts file of the test's own. The C
library takes `0x7f.0.0.N` for 127.0.0.N, while librdkafka takes it for a name.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import confluent_kafka
import confluent_kafka.admin
import pytest

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.rigs.security_rig import read_by_kafka_python, read_by_librdkafka
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import free_ports
from tests.support.servers.producing import create_topic, produce
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

NODES = (1, 2, 3)
VALUES = [f"{number}".encode() for number in range(30)]
BY_NAME = {node_id: f"broker-{node_id}.kafka.test" for node_id in NODES}
BY_NUMBER = {node_id: f"0x7f.0.0.{node_id}" for node_id in NODES}


@dataclass(frozen=True)
class Stage:
    proxy: TidegateProcess
    named_port: int
    numbered_port: int
    ca: Path
    hosts: Path

    @property
    def named(self) -> str:
        return f"kafka.test:{self.named_port}"

    @property
    def numbered(self) -> str:
        return f"localhost:{self.numbered_port}"

    @property
    def for_librdkafka(self) -> dict[str, Any]:
        return {"security.protocol": "SSL", "ssl.ca.location": str(self.ca)}


@contextmanager
def staged(kafka: KafkaCluster, home: Path, workers: int) -> Iterator[Stage]:
    authority = Authority(home / "authority")
    hosts = home / "hosts"
    names = ["kafka.test", *BY_NAME.values()]
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in names))
    identity = authority.identity("proxy", "localhost", *names, *BY_NUMBER.values())
    named_port, numbered_port = free_ports(2)
    more = ""
    for port, pattern in ((named_port, "broker-{id}.kafka.test"), (numbered_port, "0x7f.0.0.{id}")):
        more += f'[[listener]]\nbootstrap.port = {port}\nbrokers.by = "sni"\nadvertised.host = "{pattern}"\n'
        more += f"[listener.tls]\ncertificate = {json.dumps(str(identity))}\n"
    settings: dict[str, str | int] = {"workers": workers, "remote.log.metadata.topic.name": f"__metadata-{home.name}"}
    with tidegate_over(kafka, home, settings=settings, more=more) as proxy:
        yield Stage(proxy, named_port, numbered_port, authority.ca, hosts)


@pytest.fixture(scope="module")
def stage(kafka_of_three: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(kafka_of_three, tmp_path_factory.mktemp("listeners"), workers=2) as made:
        yield made


@pytest.fixture
def topics(kafka_of_three: KafkaCluster, topic_name: str) -> list[str]:
    """Topics of one partition with one replica, until every broker leads one of them."""
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_of_three.bootstrap_servers})
    led: dict[int, str] = {}
    while set(led) != set(NODES):
        name = f"{topic_name[:100]}-{len(led)}-{len(admin.list_topics(timeout=TIMEOUT_S).topics)}"
        create_topic(kafka_of_three.bootstrap_servers, name)
        produce(kafka_of_three.bootstrap_servers, name, VALUES)
        led[admin.list_topics(name, timeout=TIMEOUT_S).topics[name].partitions[0].leader] = name
    return list(led.values())


def advertised(bootstrap: str, settings: dict[str, Any]) -> dict[int, str]:
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": bootstrap, **settings})
    return {each.id: f"{each.host}:{each.port}" for each in admin.list_topics(timeout=TIMEOUT_S).brokers.values()}


def test_each_listener_tells_its_own_addresses(stage: Stage) -> None:
    host, port = stage.proxy.address
    assert advertised(stage.proxy.bootstrap_servers, {}) == {each: f"{host}:{port + each}" for each in NODES}
    of_names = {each: f"{name}:{stage.named_port}" for each, name in BY_NAME.items()}
    assert advertised(f"localhost:{stage.named_port}", stage.for_librdkafka) == of_names
    of_numbers = {each: f"{name}:{stage.numbered_port}" for each, name in BY_NUMBER.items()}
    assert advertised(stage.numbered, stage.for_librdkafka) == of_numbers


def test_librdkafka_reads_from_every_broker_by_sni(stage: Stage, topics: list[str]) -> None:
    for topic in topics:
        found = read_by_librdkafka(stage.numbered, topic, len(VALUES), stage.for_librdkafka)
        assert found == list(enumerate(VALUES))


def test_kafka_python_reads_from_every_broker_by_sni(
    stage: Stage, topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo

    def of_the_test(host: Any, *arguments: Any, **options: Any) -> Any:
        return lookup("127.0.0.1" if str(host).endswith("kafka.test") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_the_test)
    settings = {"security_protocol": "SSL", "ssl_cafile": str(stage.ca)}
    for topic in topics:
        assert read_by_kafka_python(stage.named, topic, len(VALUES), settings) == list(enumerate(VALUES))


def test_java_reads_from_every_broker_by_sni(stage: Stage, topics: list[str], tmp_path: Path) -> None:
    properties = tmp_path / "client.properties"
    properties.write_text(
        f"security.protocol=SSL\nssl.truststore.type=PEM\nssl.truststore.location={stage.ca}\nauto.offset.reset=earliest\n"
    )
    with ExitStack() as stack:
        tools = KafkaTools(options=[f"-Djdk.net.hosts.file={stage.hosts}"])
        stack.callback(tools.stop)
        for topic in topics:
            done = tools.run(
                *("kafka-console-consumer", stage.named, "--command-config", str(properties), "--topic", topic),
                *("--partition", "0", "--offset", "earliest", "--max-messages", str(len(VALUES))),
                *("--timeout-ms", "120000"),
            )
            assert done.output.split() == [value.decode() for value in VALUES], done


def test_a_broker_that_joins_later_is_reached_by_sni(kafka_of_three: KafkaCluster, tmp_path: Path) -> None:

    def start_third() -> None:
        if not kafka_of_three.brokers[3].running:
            kafka_of_three.start_broker(3)

    kafka_of_three.stop_broker(3)
    with ExitStack() as stack:
        stack.callback(start_third)
        stage = stack.enter_context(staged(kafka_of_three, tmp_path, 2))
        assert set(advertised(stage.numbered, stage.for_librdkafka)) == {1, 2}
        start_third()
        until(lambda: 3 in advertised(stage.numbered, stage.for_librdkafka))
        # This client names the broker in its first handshake.
        assert advertised(f"{BY_NUMBER[3]}:{stage.numbered_port}", stage.for_librdkafka).keys() == {*NODES}
