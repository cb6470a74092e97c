"""Every client writes a tiered, trimmed topic and reads it from offset 0."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.clients.all_clients import CLIENTS, GROUP_MEMBERS
from tests.support.clients.client import READ_COMMITTED, READ_UNCOMMITTED, OffsetOutOfRange
from tests.support.clients.kafka_tools import KafkaTools
from tests.support.rigs.matrix_stage import HEAD, TAIL, Stage, matrix_stage, value, written
from tests.support.rigs.strict_consumer import local_log_start
from tests.support.servers.kafka import KafkaCluster

pytestmark = pytest.mark.integration

IN_REMOTE = 100
"""An offset before any transaction, far from the end of the remote tier."""


@pytest.fixture(scope="module")
def stage(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with matrix_stage(kafka, tmp_path_factory.mktemp("matrix")) as made:
        yield made


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize("member", GROUP_MEMBERS)
def test_a_group_reads_each_committed_record_once_and_resumes(stage: Stage, member: str, group: str) -> None:
    name, client = GROUP_MEMBERS[member]
    topic = stage.topic_of(name)
    expected = written(HEAD + TAIL, topic).committed
    assert 0 < local_log_start(stage.kafka, topic) < expected[-1][0]
    found = client.consume(stage.bootstrap, topic, group, IN_REMOTE, READ_COMMITTED)
    found += client.consume(stage.bootstrap, topic, group, len(expected) - IN_REMOTE, READ_COMMITTED)
    assert [(record.offset, record.value) for record in found] == list(expected)


@pytest.mark.parametrize("name", CLIENTS)
def test_read_uncommitted_shows_what_was_aborted_too(stage: Stage, name: str) -> None:
    client, topic = CLIENTS[name], stage.topic_of(name)
    expected = written(HEAD + TAIL, topic).all
    found = client.read(stage.bootstrap, topic, 0, len(expected), READ_UNCOMMITTED)
    assert [(record.offset, record.value) for record in found] == list(expected)


@pytest.mark.parametrize("name", CLIENTS)
def test_offsets_at_both_ends_and_by_timestamp_in_both_tiers(stage: Stage, name: str) -> None:
    client, topic = CLIENTS[name], stage.topic_of(name)
    end = written(HEAD + TAIL, topic).end
    (remote,) = client.read(stage.bootstrap, topic, IN_REMOTE, 1, READ_UNCOMMITTED)
    earlier = client.read(stage.bootstrap, topic, 0, IN_REMOTE, READ_UNCOMMITTED)
    first = next((each.offset for each in earlier if each.timestamp >= remote.timestamp), IN_REMOTE)
    assert client.offsets(stage.bootstrap, topic, remote.timestamp) == (0, end, first)

    tail = client.read(stage.bootstrap, topic, end - 1 - TAIL[-1].count, TAIL[-1].count, READ_UNCOMMITTED)
    last = tail[-1]
    assert last.offset >= local_log_start(stage.kafka, topic)
    first = next(each.offset for each in tail if each.timestamp >= last.timestamp)
    assert client.offsets(stage.bootstrap, topic, last.timestamp) == (0, end, first)
    assert client.offsets(stage.bootstrap, topic, last.timestamp + 3_600_000) == (0, end, None)


@pytest.mark.parametrize("name", CLIENTS)
def test_above_the_end_is_out_of_range(stage: Stage, name: str) -> None:
    topic = stage.topic_of(name)
    with pytest.raises(OffsetOutOfRange):
        CLIENTS[name].read(stage.bootstrap, topic, written(HEAD + TAIL, topic).end + 1, 1, READ_UNCOMMITTED)


def test_the_command_line_tools(stage: Stage, tools: KafkaTools, group: str) -> None:
    """One session: consumes in a group, shows topic, settings, lag and offsets, deletes records, and shows again."""
    topic = stage.until_tools_topic()
    assert local_log_start(stage.kafka, topic) > 0

    def run(script: str, *args: str) -> str:
        done = tools.run(script, stage.bootstrap, *args)
        assert done.exit_code == 0, done
        return done.output

    consumed = run(
        "kafka-console-consumer",
        *("--topic", topic, "--group", group, "--from-beginning", "--max-messages", "300", "--timeout-ms", "120000"),
        *("--property", "print.offset=true"),
    )
    lines = [line for line in consumed.splitlines() if line.startswith("Offset:")]
    assert lines == [f"Offset:{n}\t{value(topic, n).decode()}" for n in range(300)]

    described = run("kafka-topics", "--describe", "--topic", topic)
    assert f"Topic: {topic}\tPartition: 0\tLeader: " in described
    replicas = described.partition("Replicas: ")[2].split()[0]
    assert sorted(map(int, replicas.split(","))) == sorted(stage.kafka.brokers)
    configured = run("kafka-configs", "--describe", "--all", "--entity-type", "topics", "--entity-name", topic)
    assert "retention.ms=" in configured

    lag = run("kafka-consumer-groups", "--describe", "--group", group, "--timeout", "120000")
    assert [line.split()[:6] for line in lag.splitlines() if topic in line] == [[group, topic, "0", "300", "300", "0"]]

    assert run("kafka-get-offsets", "--topic", topic, "--time", "latest").split() == [f"{topic}:0:300"]
    assert run("kafka-get-offsets", "--topic", topic, "--time", "1").split() == [f"{topic}:0:0"]

    deletion = stage.proxy.folder / "delete.json"
    deletion.write_text(f'{{"version": 1, "partitions": [{{"topic": "{topic}", "partition": 0, "offset": 42}}]}}')
    assert "low_watermark: 42" in run("kafka-delete-records", "--offset-json-file", str(deletion))
    assert run("kafka-get-offsets", "--topic", topic, "--time", "earliest").split() == [f"{topic}:0:42"]
