"""Kafka Streams with exactly-once restores and purges on a cluster where all possible topics are tiered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from tests.support.clients.java_process import JavaProcess
from tests.support.clients.kafka_tools import KafkaTools
from tests.support.clients.librdkafka import Librdkafka
from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.frameworks import framework_libs
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

KEYS = 200
VALUE_BYTES = 1000
SEGMENT_BYTES = 30_000
LETTERS = "abc"
SOURCES = ("table", "everywhere")


@dataclass(frozen=True)
class Stage:
    kafka: KafkaCluster
    proxy: TidegateProcess
    streams: JavaProcess
    tools: KafkaTools
    tier: Path
    table: Mapping[str, str]
    """The values of all keys in the topics `SOURCES`."""

    @property
    def bootstrap(self) -> str:
        return self.proxy.bootstrap_servers

    def start(self, application: str, protocol: str, inbox: str) -> None:
        folder = self.proxy.folder / application
        self.streams.ask(f"start {application} {self.bootstrap} {folder} {protocol} {SOURCES[0]} {SOURCES[1]} {inbox}")

    def stop(self, application: str) -> None:
        self.streams.ask(f"stop {application}")

    def reset(self, application: str, protocol: str, inbox: str) -> None:
        if protocol == "classic":
            topics = ("--input-topics", f"{inbox},{SOURCES[0]}")
            done = self.tools.run(
                "kafka-streams-application-reset", self.bootstrap, "--application-id", application, *topics, "--force"
            )
        else:
            where = ("--to-earliest", "--all-input-topics", "--delete-all-internal-topics")
            done = self.tools.run(
                "kafka-streams-groups", self.bootstrap, "--reset-offsets", "--execute", "--group", application, *where
            )
        assert done.exit_code == 0, done

    def all(self, application: str, store: str) -> dict[str, str]:
        """Returns all entries of a store. Retries while the store is unavailable because its thread rejoins."""
        lines: list[str] = []

        def is_open() -> bool:
            try:
                lines[:] = self.streams.ask(f"all {application} {store}").decode().splitlines()
            except RuntimeError as error:
                if not re.search("InvalidStateStore|StateStore(NotAvailable|Migrated)|StreamsRebalancing", str(error)):
                    raise
                return False
            return True

        until(is_open)
        return {key: value for key, _, value in (line.partition(" ") for line in lines)}

    def copied(self, topic: str) -> int:
        """Returns the number of the topic's segments in the store."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        found = admin.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result(TIMEOUT_S)
        raw = found.topic_id
        topic_id = (raw.get_most_significant_bits() % 2**64 << 64) + raw.get_least_significant_bits() % 2**64
        text = re.sub(r"(.{8})(.{4})(.{4})(.{4})(.{12})", r"\1-\2-\3-\4-\5", f"{topic_id:032x}")
        return len([*self.tier.glob(f"*/*/{text}/*/*.log")])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stage with its own broker, since its rule matches every topic."""
    home = tmp_path_factory.mktemp("streams")
    settings: dict[str, str | int] = {"remote.log.visible.after.ms": 1000}
    more = {"group.streams.initial.rebalance.delay.ms": "0"}
    with KafkaCluster(settings={**SHRINKS_SOON, **more}, java_options=SHORT_LIVED) as kafka:
        streams, tools = JavaProcess("StreamsApp", libs=[framework_libs()]), KafkaTools()
        try:
            with tidegate_over(kafka, home, tiered=["*"], segment_bytes=SEGMENT_BYTES, settings=settings) as proxy:
                table = {f"key-{n}": f"{n}:".ljust(VALUE_BYTES, "x") for n in range(KEYS)}
                for topic in SOURCES:
                    create_topic(proxy.bootstrap_servers, topic)
                    produce_pairs(proxy.bootstrap_servers, topic, [*table.items()])
                for topic in SOURCES:
                    until_trimmed(kafka, topic, KEYS // 2)
                yield Stage(kafka, proxy, streams, tools, home / "tier", table)
        finally:
            streams.stop()
            tools.stop()


def produce_pairs(bootstrap: str, topic: str, pairs: list[tuple[str, str]]) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 5, "batch.num.messages": 10, "enable.idempotence": True}
    )
    for key, value in pairs:
        producer.produce(topic, value, key)
    assert producer.flush(TIMEOUT_S) == 0


def watermarks(bootstrap: str, topic: str) -> tuple[int, int]:
    found = Librdkafka().offsets(bootstrap, topic, 0)
    return found.earliest, found.latest


@pytest.mark.parametrize("protocol", ["classic", "streams"])
def test_an_application_restores_from_both_tiers_and_purges_its_topics(stage: Stage, protocol: str) -> None:
    """The application starts three times without state.

    The second time it restores all stores from topics, two of which are partly remote. Before the third start, Kafka's
    own tool resets the application and deletes its topics."""
    application, inbox = f"app-{protocol}", f"inbox-{protocol}"
    moved, changes = f"{application}-by-letter-repartition", f"{application}-counts-changelog"
    create_topic(stage.bootstrap, inbox)
    assert all(local_log_start(stage.kafka, topic) > 0 for topic in SOURCES)
    sent: Counter[str] = Counter()

    def count(rounds: int) -> None:
        for _ in range(rounds):
            letters = [LETTERS[n % len(LETTERS)] for n in range(60)]
            produce_pairs(stage.bootstrap, inbox, [("any", letter.ljust(VALUE_BYTES, "x")) for letter in letters])
            sent.update(letters)
            until(lambda: stage.all(application, "counts") == counted())

    def counted() -> dict[str, str]:
        return {letter: str(count) for letter, count in sent.items()}

    def is_purged() -> bool:
        start, end = watermarks(stage.bootstrap, moved)
        return start == end > sent.total() and stage.copied(moved) == 0

    stage.start(application, protocol, inbox)
    count(rounds=4)
    until(lambda: stage.all(application, "table") == stage.table)
    assert stage.all(application, "everywhere") == stage.table
    until(is_purged)
    stage.stop(application)

    stage.start(application, protocol, inbox)
    assert stage.all(application, "table") == stage.table
    assert stage.all(application, "everywhere") == stage.table
    assert stage.all(application, "counts") == counted()
    count(rounds=1)
    until(is_purged)
    stage.stop(application)

    assert watermarks(stage.kafka.bootstrap_servers, moved) == watermarks(stage.bootstrap, moved)
    is_tiered = f'remote_log_size_bytes{{partition="0",process="remote-log",topic="{moved}"}} 0.0'
    until(lambda: is_tiered in stage.proxy.metrics())  # set at the end of a task's run
    metrics, output = stage.proxy.metrics(), stage.proxy.output.read_text()
    assert f'topic="{changes}"' not in metrics, "it is compacted"
    assert stage.copied(changes) == 0
    assert stage.proxy.metric("tidegate_remote_log_alarms_total", topic=moved) == 0
    # Messages about topics that the reset of another application deletes are allowed.
    own = [line for line in output.splitlines() if application in line or inbox in line]
    trouble = [line for line in own if "could not be processed" in line]
    # On a busy machine answers may be late, and the next round retries.
    assert not [line for line in trouble if not re.search(r" (in|for) (time|\d+ ms)", line)]
    assert not [line for line in output.splitlines() if " ERROR " in line]

    stage.reset(application, protocol, inbox)
    admin = AdminClient({"bootstrap.servers": stage.bootstrap})
    until(lambda: moved not in admin.list_topics(timeout=TIMEOUT_S).topics)  # a broker may name it a moment longer
    until_trimmed(stage.kafka, inbox, 1)
    stage.start(application, protocol, inbox)
    until(lambda: stage.all(application, "counts") == counted())
    until(lambda: stage.all(application, "table") == stage.table)
    stage.stop(application)
