"""Kafka Connect and MirrorMaker 2 work through the proxy, over topics whose head is remote."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import pytest
from confluent_kafka.admin import AdminClient

from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import consumer_at, local_log_start, read, until_trimmed
from tests.support.rigs.topic_config_client import described
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.connect import ConnectWorker
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

SEGMENT_BYTES = 30_000
WORKER_SETTINGS = {
    "exactly.once.source.support": "enabled",
    "session.timeout.ms": "120000",  # with the default of ten seconds, a stalled worker would stop its tasks
}


@dataclass(frozen=True)
class Stage:
    kafka: KafkaCluster
    proxy: TidegateProcess
    worker: ConnectWorker
    run: str
    """The prefix of every topic name."""

    @property
    def bootstrap(self) -> str:
        return self.proxy.bootstrap_servers

    def connect(self, name: str, connector: str, settings: Mapping[str, str]) -> None:
        """Returns when the connector and its tasks run."""
        self.until_taken("PUT", f"/connectors/{name}/config", {"connector.class": connector, **settings})
        self.until_running(name)

    def until_taken(self, method: str, path: str, body: Mapping[str, str] | None = None) -> None:
        """Sends a request until Connect accepts it. Connect refuses requests while its group rebalances."""

        def is_taken() -> bool:
            try:
                self.worker.ask(method, path, body)
            except HTTPError as error:
                if error.code != HTTPStatus.CONFLICT:
                    raise
                return False
            return True

        until(is_taken)

    def until_running(self, name: str) -> None:
        def is_running() -> bool:
            states = self.worker.states(name)
            assert "FAILED" not in states, self.worker.ask("GET", f"/connectors/{name}/status")
            return len(states) > 1 and set(states) == {"RUNNING"}

        until(is_running)


@pytest.fixture(scope="module")
def stage(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Yields a stage. The topic rule also matches the worker's own topics, which are compacted."""
    run = f"connect-{uuid.uuid4().hex[:8]}"
    home = tmp_path_factory.mktemp("connect")
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{run}",
        "remote.log.visible.after.ms": 1000,
    }
    patterns = [f"{run}-*", f"near.{run}-*"]
    with (
        tidegate_over(kafka, home, tiered=patterns, segment_bytes=SEGMENT_BYTES, settings=settings) as proxy,
        ConnectWorker(proxy.bootstrap_servers, run, WORKER_SETTINGS) as worker,
    ):
        yield Stage(kafka, proxy, worker, run)


def lines(first: int, count: int) -> str:
    return "".join(f"{n}:".ljust(1000, "x") + "\n" for n in range(first, first + count))


def test_a_file_goes_through_a_topic_and_is_read_again_from_its_start(stage: Stage, tmp_path: Path) -> None:
    topic, source, sink = f"{stage.run}-lines", tmp_path / "source.txt", tmp_path / "sink.txt"
    source.write_text(lines(0, 200))
    settings = {"file": str(source), "topic": topic, "producer.override.batch.size": "4096", "tasks.max": "1"}
    settings |= {"topic.creation.default.replication.factor": "1", "topic.creation.default.partitions": "1"}
    stage.connect("source", "FileStreamSource", settings)
    admin = AdminClient({"bootstrap.servers": stage.bootstrap})
    until(lambda: topic in admin.list_topics(timeout=TIMEOUT_S).topics)
    until_trimmed(stage.kafka, topic, 100)

    stage.connect("sink", "FileStreamSink", {"file": str(sink), "topics": topic, "tasks.max": "1"})
    until(lambda: sink.read_text() == source.read_text())

    for name in ("source", "sink"):
        stage.until_taken("POST", f"/connectors/{name}/restart?includeTasks=true&onlyFailed=false")
        stage.until_running(name)
    with source.open("a") as more:
        more.write(lines(200, 50))
    until(lambda: sink.read_text() == source.read_text())

    stage.until_taken("PUT", "/connectors/sink/stop")
    until(lambda: stage.worker.states("sink") == ["STOPPED"])
    until(lambda: are_forgotten(stage.worker))
    sink.unlink()
    assert local_log_start(stage.kafka, topic) > 0
    stage.until_taken("PUT", "/connectors/sink/resume")
    until(lambda: sink.exists() and sink.read_text() == source.read_text())


def are_forgotten(worker: ConnectWorker) -> bool:
    """Whether the worker has deleted the offsets of a stopped sink.

    Connect asks for a retry while the sink's task leaves its group, and while the worker's group rebalances."""
    try:
        worker.ask("DELETE", "/connectors/sink/offsets")
    except HTTPError as error:
        if error.code not in (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.CONFLICT):
            raise
        return False
    return True


def test_mirror_maker_copies_a_topic_that_is_remote_by_half(stage: Stage) -> None:
    topic, deleted, count = f"{stage.run}-half", 7, 120
    config = {"remote.storage.enable": "true", "local.retention.bytes": "1", "retention.ms": "7200000"}
    create_topic(stage.bootstrap, topic, partitions=2, config=config)
    values = [random_values(count), random_values(count)]
    for n in range(2):
        produce(stage.bootstrap, topic, values[n], partition=n)
    until_trimmed(stage.kafka, topic, count // 2)
    admin = AdminClient({"bootstrap.servers": stage.bootstrap})
    assert delete_records(stage.bootstrap, topic, deleted, 1) == deleted

    byte_array = "org.apache.kafka.connect.converters.ByteArrayConverter"
    settings = {
        "source.cluster.alias": "near",
        "target.cluster.alias": "far",
        "source.cluster.bootstrap.servers": stage.bootstrap,
        "target.cluster.bootstrap.servers": stage.bootstrap,
        "topics": f"{stage.run}-h.*",
        "key.converter": byte_array,
        "value.converter": byte_array,
        "replication.factor": "1",
        "offset-syncs.topic.replication.factor": "1",
        "source.consumer.isolation.level": "read_committed",
        "tasks.max": "2",
    }
    stage.connect("mirror", "org.apache.kafka.connect.mirror.MirrorSourceConnector", settings)

    mirrored = f"near.{topic}"
    until(lambda: mirrored in admin.list_topics(timeout=TIMEOUT_S).topics)
    for n, expected in enumerate([values[0], values[1][deleted:]]):
        with consumer_at(stage.bootstrap, mirrored, 0, n) as consumer:
            assert [value for _, value in read(consumer, len(expected))] == expected
    found = described(stage.bootstrap, mirrored, config)
    assert {key: found[key].value for key in config} == config
