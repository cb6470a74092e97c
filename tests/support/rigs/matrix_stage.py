"""One `tidegate serve` in front of a cluster. Every client has written a topic, which is trimmed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.clients.all_clients import CLIENTS
from tests.support.clients.client import Client
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.servers.kafka import CONSOLE_PRODUCER, KafkaCluster
from tests.support.servers.producing import create_topic, until_decided
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

VALUE_BYTES = 400
SEGMENT_BYTES = 30_000
RECORDS_IN_TOOLS_TOPIC = 300
PATIENCE = ("--request-timeout-ms", "30000", "--message-send-max-retries", "1000")
"""Options of the console producer. By default it silently drops a record that is not acknowledged after 4 x 1.5 s."""
TRIMMED_AT_LEAST = 250
"""An offset behind the first aborted transaction, and before the end of the second.

The second one is larger than a segment."""


@dataclass(frozen=True)
class Part:
    """Records that one call of a client writes. If `commit` is None, they are outside of any transaction."""

    count: int
    commit: bool | None = None


HEAD = (Part(200), Part(40, False), Part(40, True), Part(100, False), Part(20, True))
TAIL = (Part(20), Part(5, False), Part(5, True))


@dataclass(frozen=True)
class Written:
    """The written offsets and values. A marker ends every transaction and takes an offset."""

    all: tuple[tuple[int, bytes], ...]
    committed: tuple[tuple[int, bytes], ...]
    end: int


def written(parts: tuple[Part, ...], topic: str) -> Written:
    everything: list[tuple[int, bytes]] = []
    committed: list[tuple[int, bytes]] = []
    offset = 0
    for part in parts:
        records = [(n, value(topic, n)) for n in range(offset, offset + part.count)]
        everything += records
        committed += records if part.commit is not False else []
        offset += part.count + (part.commit is not None)
    return Written(tuple(everything), tuple(committed), offset)


def value(topic: str, offset: int) -> bytes:
    """Returns one word that is different at every offset."""
    return f"{topic}:{offset}:".ljust(VALUE_BYTES, "x").encode()


@dataclass(frozen=True)
class Stage:
    kafka: KafkaCluster
    proxy: TidegateProcess
    topics: dict[str, str]
    """The topics by client name."""
    tools_topic: str
    _prepared: dict[str, Future[None]]

    @property
    def bootstrap(self) -> str:
        return self.proxy.bootstrap_servers

    def topic_of(self, client: str) -> str:
        """Returns the client's topic. Raises the error if the client could not write it."""
        self._prepared[client].result()
        return self.topics[client]

    def until_tools_topic(self) -> str:
        self._prepared[""].result()
        return self.tools_topic


@contextmanager
def matrix_stage(kafka: KafkaCluster, home: Path) -> Iterator[Stage]:
    run = uuid.uuid4().hex[:8]
    topics = {name: f"matrix-{run}-{name}" for name in CLIENTS}
    tools_topic = f"matrix-{run}-tools"
    for topic in (*topics.values(), tools_topic):
        create_topic(kafka.bootstrap_servers, topic, replicas=len(kafka.brokers))
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{run}",
        "remote.log.visible.after.ms": 2000,
    }
    with (
        tidegate_over(kafka, home, tiered=[f"matrix-{run}-*"], segment_bytes=SEGMENT_BYTES, settings=settings) as proxy,
        ThreadPoolExecutor(len(topics) + 1) as pool,
    ):
        prepared = {name: pool.submit(_prepare, kafka, proxy, CLIENTS[name], topic) for name, topic in topics.items()}
        prepared[""] = pool.submit(_prepare_for_tools, kafka, proxy, tools_topic)
        yield Stage(kafka, proxy, topics, tools_topic, prepared)


def _prepare(kafka: KafkaCluster, proxy: TidegateProcess, client: Client, topic: str) -> None:
    offset = 0
    for part in HEAD:
        offset = _write(kafka, proxy, client, topic, part, offset)
    until_trimmed(kafka, topic, TRIMMED_AT_LEAST)
    for part in TAIL:
        offset = _write(kafka, proxy, client, topic, part, offset)


def _write(kafka: KafkaCluster, proxy: TidegateProcess, client: Client, topic: str, part: Part, offset: int) -> int:
    """Writes records. Returns the next offset when all records are stored."""
    values = [value(topic, n) for n in range(offset, offset + part.count)]
    if part.commit is None:
        client.produce(proxy.bootstrap_servers, topic, values)
        return offset + part.count
    client.transact(proxy.bootstrap_servers, topic, values, transactional_id=topic, commit=part.commit)
    until_decided(kafka.bootstrap_servers, topic)
    return offset + part.count + 1


def _prepare_for_tools(kafka: KafkaCluster, proxy: TidegateProcess, topic: str) -> None:
    values = [value(topic, n) for n in range(RECORDS_IN_TOOLS_TOPIC)]
    lines = b"\n".join(values).decode()
    at = ("--bootstrap-server", proxy.bootstrap_servers, "--topic", topic)
    kafka.run_tool(CONSOLE_PRODUCER, *at, *PATIENCE, "--producer-property", "batch.size=4096", stdin=lines)
    until_trimmed(kafka, topic, 100)
