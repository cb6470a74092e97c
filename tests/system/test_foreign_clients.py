"""Sarama, kafka-go and kafkajs write and read a log in both tiers with every codec, and stay in their groups.

`TIDEGATE_STORE_STOPPED_S` is the time for which the store is stopped. `make soak` sets a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.clients.client import READ_COMMITTED, READ_UNCOMMITTED, Reader
from tests.support.clients.programs import KafkaGo, KafkaJs, Member, Sarama
from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration

HEAD, TAIL = 100, 10
"""The records that each writer writes before the trim, and behind it."""
SESSION_TIMEOUT_S = 10
"""The members' own setting. The coordinator removes a member that sends no heartbeat for this time."""
STOPPED_S = float(os.environ.get("TIDEGATE_STORE_STOPPED_S", 2 * SESSION_TIMEOUT_S))
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


class ForeignClient(Reader, Protocol):
    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes], codec: str) -> None: ...

    def member(self, bootstrap: str, topic: str, group: str, end: int) -> Member: ...


SARAMA = {"sarama-0.11": Sarama("0.11.0.0"), "sarama-2.1": Sarama("2.1.0"), "sarama-newest": Sarama()}
FOREIGN: Mapping[str, ForeignClient] = {
    **SARAMA,
    "kafka-go": KafkaGo(),
    "kafkajs": KafkaJs(),
}


def writes(name: str, codec: str) -> bool:
    """Whether the client can write the codec. zstd came with Kafka 2.1. kafkajs has no encoder for lz4 and zstd."""
    return (name, codec) not in {("sarama-0.11", "zstd"), ("kafkajs", "lz4"), ("kafkajs", "zstd")}


@dataclass(frozen=True)
class Seam:
    """A topic per codec, which all clients have written in turns. The broker no longer has its first half."""

    cluster: KafkaCluster
    proxy: TidegateProcess
    topics: Mapping[str, str]
    values: Mapping[str, Sequence[bytes]]


@pytest.fixture(scope="module")
def seam(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seam]:
    home = tmp_path_factory.mktemp("foreign")
    topics = {codec: f"{home.name}-{codec}" for codec in CODECS}
    for topic in topics.values():
        create_topic(kafka.bootstrap_servers, topic)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{home.name}",
        "remote.log.visible.after.ms": 2000,
    }
    tiered = [*topics.values()]
    values: dict[str, list[bytes]] = {codec: [] for codec in CODECS}
    with tidegate_over(kafka, home, tiered=tiered, segment_bytes=30_000, settings=settings) as proxy:
        for count in (HEAD, TAIL):
            for codec, topic in topics.items():
                for client in (client for name, client in FOREIGN.items() if writes(name, codec)):
                    new = [value.hex().encode() for value in random_values(count, 300)]
                    client.produce(proxy.bootstrap_servers, topic, new, codec)
                    values[codec] += new
            if count == HEAD:
                for codec, topic in topics.items():
                    until_trimmed(kafka, topic, len(values[codec]) // 2)
        yield Seam(kafka, proxy, topics, values)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", FOREIGN)
def test_it_reads_both_tiers_of_every_codec(seam: Seam, name: str, codec: str) -> None:
    if name == "sarama-0.11" and codec == "zstd":
        check_that_zstd_is_refused(seam)
        return
    topic, values = seam.topics[codec], seam.values[codec]
    assert 0 < local_log_start(seam.cluster, topic) < len(values)
    for isolation in (READ_UNCOMMITTED, READ_COMMITTED):
        found = FOREIGN[name].read(seam.proxy.bootstrap_servers, topic, 0, len(values), isolation)
        assert [(record.offset, record.value) for record in found] == list(enumerate(values)), isolation


def check_that_zstd_is_refused(seam: Seam) -> None:
    """A Fetch of this version cannot name the codec, so remote records of it are an error and no guess (KIP-110)."""
    with pytest.raises(RuntimeError, match="compression"):
        FOREIGN["sarama-0.11"].read(seam.proxy.bootstrap_servers, seam.topics["zstd"], 0, 1, READ_UNCOMMITTED)


@pytest.mark.parametrize("name", SARAMA)
def test_sarama_finds_both_ends_and_a_time(seam: Seam, name: str) -> None:
    client, topic, values = SARAMA[name], seam.topics["none"], seam.values["none"]
    (remote,) = client.read(seam.proxy.bootstrap_servers, topic, 50, 1, READ_UNCOMMITTED)
    found = client.offsets(seam.proxy.bootstrap_servers, topic, remote.timestamp)
    assert (found.earliest, found.latest) == (0, len(values))
    assert found.at_timestamp is not None
    assert found.at_timestamp <= 50


@pytest.mark.timeout(STOPPED_S + 600)
async def test_members_outlive_a_stopped_store(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """The next records of each group are in the store alone. Heartbeats may share a connection with Fetches."""
    create_topic(kafka.bootstrap_servers, topic_name)
    values = random_values(600)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}",
        "remote.log.visible.after.ms": 2000,
    }
    with VersityGateway() as gateway, ExitStack() as stack:
        await gateway.create_bucket("stopped")
        store = {"implementation": "s3", "timeout.ms": "3000", **gateway.settings("stopped")}
        proxy = tidegate_over(
            kafka, tmp_path, tiered=[topic_name], segment_bytes=100_000, storage=store, settings=settings
        )
        stack.enter_context(proxy)
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values)
        await asyncio.to_thread(until_trimmed, kafka, topic_name, 300)
        gateway.kill()
        members = {
            name: stack.enter_context(
                client.member(proxy.bootstrap_servers, topic_name, f"{name}-{topic_name}", len(values))
            )
            for name, client in FOREIGN.items()
        }
        await asyncio.to_thread(until, lambda: all(each.joined > 0 for each in members.values()))
        end = time.monotonic() + STOPPED_S
        while time.monotonic() < end:  # nothing must happen for this time
            joined = {name: member.joined for name, member in members.items()}
            assert joined == dict.fromkeys(FOREIGN, 1), "the coordinator has removed a member"
            await asyncio.sleep(0.5)
        assert all(member.offsets == [] for member in members.values())
        gateway.start()
        for name, member in members.items():
            await asyncio.to_thread(member.wait)
            assert (member.offsets, member.joined) == ([*range(len(values))], 1), name
