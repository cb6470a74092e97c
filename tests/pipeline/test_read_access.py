"""A reader needs the brokers' right to read the topic. The reader asks the brokers before it reads the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin._acl import AclOperation

from pipeline.source.options import OptionError
from pipeline.source.tiered_log import AccessDeniedError
from tests.support.pipeline.read_stage import rows_of
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, delete_topic, produce
from tests.support.servers.secure_kafka import USERS, allow

pytestmark = [pytest.mark.integration, pytest.mark.full]


@pytest.fixture
def topic(secured: KafkaCluster, topic_name: str) -> Iterator[str]:
    create_topic(secured.bootstrap_servers, topic_name)
    yield topic_name
    delete_topic(secured.bootstrap_servers, topic_name)


def options_of(secured: KafkaCluster, topic: str, user: str, folder: Path) -> dict[str, str]:
    """The file may do everything; the user comes by SCRAM."""
    broker = secured.brokers[1]
    file = folder / "tidegate.toml"
    file.write_text(
        f'remote.log.metadata.topic.name = "__metadata-{topic}"\n'
        f'[upstream]\nbootstrap.servers = "{secured.bootstrap_servers}"\n'
        f'[storage]\nimplementation = "local"\npath = "{folder}"\n'
    )
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return {
        "config": str(file),
        "subscribe": topic,
        "kafka.bootstrap.servers": f"localhost:{broker.secure_ports['SASL_PLAINTEXT']}",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": f'{module} required username="{user}" password="{USERS[user]}";',
    }


def test_store_credentials_alone_read_no_topic(secured: KafkaCluster, topic: str, tmp_path: Path) -> None:
    options = options_of(secured, topic, "alice", tmp_path)
    with pytest.raises(OptionError, match="or this reader may not describe it"):
        rows_of(options)
    allow(secured, "alice", topic, [AclOperation.DESCRIBE])
    with pytest.raises(AccessDeniedError, match=f"not allowed to read the topic {topic}"):
        rows_of(options)


def test_whom_the_brokers_let_read_reads(secured: KafkaCluster, topic: str, tmp_path: Path) -> None:
    allow(secured, "bob", topic, [AclOperation.READ])
    produce(secured.bootstrap_servers, topic, [b"one", b"two"])
    options = {**options_of(secured, topic, "bob", tmp_path), "tier": "local"}
    assert [row["value"] for row in rows_of(options)] == [b"one", b"two"]
    del options["config"]
    assert [row["value"] for row in rows_of(options)] == [b"one", b"two"]
