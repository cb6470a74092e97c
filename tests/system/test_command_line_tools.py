"""Kafka's own command-line tools give equal answers through the proxy and on the broker, except for the tier."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.api_keys import HIDDEN_APIS, ApiKey
from tests.support.clients.kafka_tools import KafkaTools, ToolResult
from tests.support.rigs import matrix_stage
from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, produce_transaction
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

COUNT = 200
IN_REMOTE = 20
"""The offset of the group, inside the remote tier."""

EQUAL = """
kafka-topics --list
kafka-topics --describe --topic {plain}
kafka-topics --describe --under-replicated-partitions
kafka-topics --describe --topic {run}-none
kafka-configs --alter --entity-type users --entity-name {run} --add-config SCRAM-SHA-256=[password=x]
kafka-configs --alter --entity-type clients --entity-name {run} --add-config consumer_byte_rate=1000000000
kafka-configs --alter --entity-type groups --entity-name {run} --add-config consumer.session.timeout.ms=50000
kafka-configs --alter --entity-type topics --entity-name {tiered} --add-config no.such.config=1
kafka-client-metrics --alter --name {run} --metrics x --interval 100000 --match client_id={run}
kafka-configs --describe --entity-type topics --entity-name {tiered}
kafka-configs --describe --all --entity-type topics --entity-name {plain}
kafka-configs --describe --entity-type topics
kafka-configs --describe --entity-type brokers --entity-default
kafka-configs --describe --entity-type broker-loggers --entity-name 1
kafka-configs --describe --entity-type users
kafka-configs --describe --entity-type clients
kafka-configs --describe --entity-type ips
kafka-configs --describe --entity-type groups
kafka-configs --describe --entity-type client-metrics
kafka-consumer-groups --describe --group {group}
kafka-consumer-groups --describe --group {group} --state
kafka-consumer-groups --describe --group {group} --members --verbose
kafka-consumer-groups --describe --group {run}-none
kafka-consumer-groups --reset-offsets --dry-run --to-latest --group {group} --topic {tiered}
kafka-consumer-groups --reset-offsets --dry-run --to-current --export --group {group} --topic {tiered}
kafka-consumer-groups --reset-offsets --dry-run --to-earliest --group {group} --topic {plain}
kafka-get-offsets --topic {tiered} --time -1
kafka-get-offsets --topic {tiered} --time latest
kafka-get-offsets --topic {tiered} --time 99999999999999
kafka-get-offsets --topic {tiered} --time max-timestamp
kafka-get-offsets --topic {plain} --time earliest
kafka-get-offsets --topic {plain} --time earliest-local
kafka-get-offsets --topic-partitions {tiered}:0
kafka-get-offsets --topic {run}-none
kafka-leader-election --election-type preferred --topic {tiered} --partition 0
kafka-leader-election --election-type preferred --all-topic-partitions
kafka-leader-election --election-type unclean --path-to-json-file {folder}/elections.json
kafka-reassign-partitions --verify --reassignment-json-file {folder}/reassignment.json
kafka-reassign-partitions --generate --topics-to-move-json-file {folder}/topics.json --broker-list 1
kafka-reassign-partitions --execute --reassignment-json-file {folder}/reassignment.json
kafka-reassign-partitions --list
kafka-reassign-partitions --cancel --reassignment-json-file {folder}/reassignment.json
kafka-acls --list
kafka-acls --add --allow-principal User:x --operation Read --topic {tiered}
kafka-transactions list --transactional-id-pattern {run}.*
kafka-transactions describe-producers --topic {tiered} --partition 0
kafka-transactions find-hanging --broker-id 1 --topic {tiered}
kafka-cluster cluster-id
kafka-cluster list-endpoints
kafka-client-metrics --list
kafka-client-metrics --describe
""".strip().splitlines()
"""Commands whose outputs must be equal, except for the broker's address."""

EQUAL_UNLESS_GROUPS_CHANGE = """
kafka-consumer-groups --list --state
kafka-groups --list
kafka-streams-groups --list
kafka-share-groups --list
""".strip().splitlines()
"""Commands that list all groups of the broker.

The groups of the proxy and of earlier tests may come, go or rebalance meanwhile."""

EQUAL_BUT_FOR_NUMBERS = """
kafka-transactions describe --transactional-id {run}
kafka-features describe
kafka-metadata-quorum describe --status
kafka-metadata-quorum describe --replication
kafka-producer-perf-test --topic {plain} --num-records 10 --record-size 100 --throughput -1
kafka-consumer-perf-test --topic {plain} --num-records 10 --timeout 120000
""".strip().splitlines()


PATIENCE = {
    "kafka-console-producer": matrix_stage.PATIENCE,
    "kafka-consumer-groups": ("--timeout", "120000"),
}
"""Options for tools whose default timeouts are shorter than those of clients."""


@dataclass(frozen=True)
class Stage:
    kafka: KafkaCluster
    proxy: TidegateProcess
    tools: KafkaTools
    folder: Path
    run: str

    @property
    def tiered(self) -> str:
        return f"{self.run}-tiered"

    @property
    def plain(self) -> str:
        return f"{self.run}-plain"

    @property
    def group(self) -> str:
        return f"{self.run}-group"

    def words(self, command: str) -> list[str]:
        names = {"tiered": self.tiered, "plain": self.plain, "group": self.group, "run": self.run}
        words = command.format(**names, folder=self.folder).split()
        return [*words, *PATIENCE.get(words[0], ())]

    def through_proxy(self, command: str, stdin: str = "") -> str:
        """Returns the output of a tool, which must succeed."""
        script, *args = self.words(command)
        done = self.tools.run(script, self.proxy.bootstrap_servers, *args, stdin=stdin)
        assert done.exit_code == 0, done
        return done.output

    def both(self, command: str) -> tuple[ToolResult, ToolResult]:
        """Runs a command through the proxy and on the broker. Replaces the addresses of both with `BROKER`."""
        script, *args = self.words(command)
        host, port = self.proxy.address
        proxied = self.tools.run(script, self.proxy.bootstrap_servers, *args)
        direct = self.tools.run(script, self.kafka.bootstrap_servers, *args)
        broker_host, broker_port = self.kafka.address()
        time_and_echo = r"|^\d\d:\d\d:\d\d\.\d{3}|(?<=--bootstrap-server )\S+"
        return (
            _with(proxied, rf"{re.escape(host)}( +|:){port + 1}\b{time_and_echo}", "BROKER"),
            _with(direct, rf"{re.escape(broker_host)}( +|:){broker_port}\b{time_and_echo}", "BROKER"),
        )


def _with(result: ToolResult, pattern: str, text: str) -> ToolResult:
    output, errors = (re.sub(pattern, text, each, flags=re.MULTILINE) for each in (result.output, result.errors))
    return ToolResult(result.exit_code, output, errors)


@pytest.fixture(scope="module")
def stage(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    run = f"tools-{uuid.uuid4().hex[:8]}"
    home = tmp_path_factory.mktemp("tools")
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{run}",
        "remote.log.visible.after.ms": 1000,
    }
    tools = KafkaTools()
    try:
        with tidegate_over(kafka, home, tiered=[f"{run}-tiered"], segment_bytes=30_000, settings=settings) as proxy:
            made = Stage(kafka, proxy, tools, home, run)
            _prepare(made)
            yield made
    finally:
        tools.stop()


def _prepare(stage: Stage) -> None:
    bootstrap, topic = stage.proxy.bootstrap_servers, stage.tiered
    for each in (topic, stage.plain):
        create_topic(bootstrap, each)
        produce(bootstrap, each, [line(n).encode() for n in range(COUNT)])
    partition = {"topic": topic, "partition": 0}
    contents = {
        "elections": {"partitions": [partition]},
        "reassignment": {"version": 1, "partitions": [{**partition, "replicas": [1]}]},
        "topics": {"version": 1, "topics": [{"topic": topic}]},
    }
    for name, content in contents.items():
        (stage.folder / f"{name}.json").write_text(json.dumps(content))
    produce_transaction(bootstrap, stage.plain, [b"x"], transactional_id=stage.run, commit=True)
    until_trimmed(stage.kafka, topic, COUNT // 2)
    stage.through_proxy(reset("{group}", f"--to-offset {IN_REMOTE}"))


def line(number: int) -> str:
    return f"{number}:".ljust(1000, "x")


def reset(group: str, where: str, how: str = "--execute") -> str:
    return f"kafka-consumer-groups --reset-offsets {how} --group {group} --topic {{tiered}} {where}"


@pytest.mark.parametrize("command", EQUAL)
def test_a_tool_says_the_same_as_on_the_broker(stage: Stage, command: str) -> None:
    proxied, direct = stage.both(command)
    assert proxied == direct


@pytest.mark.parametrize("command", EQUAL_UNLESS_GROUPS_CHANGE)
def test_a_tool_says_the_same_of_groups_as_on_the_broker(stage: Stage, command: str) -> None:
    (_, before), (proxied, after) = stage.both(command), stage.both(command)
    while before != after:
        before, (proxied, after) = after, stage.both(command)
    assert proxied == after


@pytest.mark.parametrize("command", EQUAL_BUT_FOR_NUMBERS)
def test_a_tool_says_the_same_in_other_numbers(stage: Stage, command: str) -> None:
    progress = r"^.* max latency\.\n"  # the tool prints it every five seconds
    proxied, direct = (_with(_with(found, progress, ""), r"[\d.:-]*\d", "N") for found in stage.both(command))
    assert proxied.exit_code == direct.exit_code == 0
    assert sorted(proxied.output.split()) == sorted(direct.output.split())


def test_the_settings_of_a_broker_are_its_own(stage: Stage) -> None:
    script, *args = ["kafka-configs", "--describe", "--all", "--entity-type", "brokers", "--entity-name", "1"]
    proxied, direct = (
        stage.tools.run(script, bootstrap, *args)
        for bootstrap in (stage.proxy.bootstrap_servers, stage.kafka.bootstrap_servers)
    )
    assert proxied == direct


@pytest.mark.parametrize("which", ["--topic {tiered}", "--topics-with-overrides"])
def test_topics_say_that_they_are_tiered(stage: Stage, which: str) -> None:
    command = f"kafka-topics --describe {which}"
    # If the proxy cannot look up the settings within seconds, it relays the broker's answer.
    until(lambda: "remote.storage.enable=true," in stage.through_proxy(command))
    proxied, direct = stage.both(command)
    assert "remote.storage.enable=true," in proxied.output
    assert _with(proxied, r"remote\.storage\.enable=true,|,local\.retention\.bytes=1\b", "") == direct


def test_offsets_of_both_tiers(stage: Stage) -> None:
    def offset(time: str) -> list[str]:
        return stage.through_proxy(f"kafka-get-offsets --topic {{tiered}} --time {time}").split()

    for earliest in ("earliest", "-2", "1"):
        assert offset(earliest) == [f"{stage.tiered}:0:0"]
    before = local_log_start(stage.kafka, stage.tiered)
    (local,) = offset("earliest-local")
    assert 0 < before <= int(local.rpartition(":")[2]) <= local_log_start(stage.kafka, stage.tiered)
    until(lambda: offset("latest-tiered") == [f"{stage.tiered}:0:{COUNT - 1}"])
    assert offset("-5") == [f"{stage.tiered}:0:{COUNT - 1}"]
    assert offset("earliest-pending-upload") == offset("-6") == [f"{stage.tiered}:0:{COUNT}"]


@pytest.mark.parametrize("options", ["", "--broker-list 1 ", "--topic-list {plain} ", "--topic-list {tiered} "])
def test_the_size_of_the_tier_is_that_of_one_more_directory(stage: Stage, options: str) -> None:
    """The tool asks for all partitions, and leaves out those that the user did not ask for."""

    def directories(output: str) -> dict[str, dict[str, int]]:
        (broker,) = json.loads(output.splitlines()[-1])["brokers"]
        return {
            each["logDir"]: {one["partition"]: one["size"] for one in each["partitions"]} for each in broker["logDirs"]
        }

    def of_the_tier() -> int:
        return sum(each.stat().st_size for each in (stage.folder / "tier").glob("*/*/*/0/*.log"))

    def is_right() -> bool:
        """The proxy counts once a minute, and the last segment may have been copied since."""
        proxied, direct = (directories(found.output) for found in stage.both(f"kafka-log-dirs --describe {options}"))
        remote = proxied.pop("remote://local")
        assert proxied.keys() == direct.keys()
        assert remote.keys() == ({} if "plain" in options else {f"{stage.tiered}-0": 0}).keys()
        return not remote or remote[f"{stage.tiered}-0"] == of_the_tier()

    latest_tiered = "kafka-get-offsets --topic {tiered} --time latest-tiered"
    until(lambda: stage.through_proxy(latest_tiered).split() == [f"{stage.tiered}:0:{COUNT - 1}"])
    until(is_right)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("--to-earliest", 0),
        ("--to-datetime 2020-01-01T00:00:00.000", 0),
        ("--by-duration P1D", 0),
        ("--shift-by -10", IN_REMOTE - 10),
        ("--to-offset 5", 5),
        ("--to-latest", COUNT),
    ],
)
def test_a_group_is_put_into_the_remote_tier_and_read_on_from_there(stage: Stage, where: str, expected: int) -> None:
    group = f"{stage.run}-{uuid.uuid4().hex[:8]}"
    stage.through_proxy(reset(group, f"--to-offset {IN_REMOTE}"))
    dry = stage.through_proxy(reset(group, where, "--dry-run")).splitlines()
    assert [row.split() for row in dry if group in row] == [[group, stage.tiered, "0", str(expected)]]
    stage.through_proxy(reset(group, where))
    described = stage.through_proxy(f"kafka-consumer-groups --describe --group {group}").splitlines()
    (row,) = [row.split() for row in described if group in row and stage.tiered in row]
    assert row[3:6] == [str(expected), str(COUNT), str(COUNT - expected)]
    if expected < COUNT:
        consume = f"kafka-console-consumer --topic {{tiered}} --group {group} --max-messages 3 --timeout-ms 120000"
        assert stage.through_proxy(consume).splitlines() == [line(expected + n) for n in range(3)]
    stage.through_proxy(f"kafka-consumer-groups --delete-offsets --group {group} --topic {{tiered}}")
    stage.through_proxy(f"kafka-consumer-groups --delete --group {group}")
    assert group not in stage.through_proxy("kafka-consumer-groups --list")


def test_consumers_read_it_all(stage: Stage) -> None:
    everything = [line(n) for n in range(COUNT)]
    consume = f"kafka-console-consumer --topic {{tiered}} --max-messages {COUNT} --timeout-ms 120000"
    assert stage.through_proxy(f"{consume} --from-beginning").splitlines() == everything
    assert stage.through_proxy(f"{consume} --partition 0 --offset earliest").splitlines() == everything

    verifiable = f"kafka-verifiable-consumer --topic {{tiered}} --group-id {stage.run}-v --max-messages {COUNT}"
    verifiable += " --reset-policy earliest --session-timeout 120000"
    events = [json.loads(event) for event in stage.through_proxy(verifiable).splitlines()]
    consumed = [part for event in events for part in event.get("partitions", []) if event["name"] == "records_consumed"]
    assert consumed[0]["minOffset"] == 0
    assert consumed[-1]["maxOffset"] == COUNT - 1
    assert sum(part["count"] for part in consumed) == COUNT

    measured = stage.through_proxy(
        f"kafka-consumer-perf-test --topic {{tiered}} --num-records {COUNT} --timeout 120000"
    )
    assert int(measured.splitlines()[-1].split(", ")[4]) == COUNT


def test_a_topic_is_written_and_its_head_deleted(stage: Stage) -> None:
    topic = f"{stage.run}-written"
    stage.through_proxy(f"kafka-topics --create --topic {topic} --partitions 1 --replication-factor 1")
    produce = f"kafka-console-producer --topic {topic} --reader-property parse.key=true"
    stage.through_proxy(produce, stdin="a\t1\nb\t2\nc\t3\n")
    consume = f"kafka-console-consumer --topic {topic} --from-beginning --max-messages 3 --timeout-ms 120000"
    assert stage.through_proxy(f"{consume} --formatter-property print.key=true").split() == list("a1b2c3")
    deletion = stage.folder / "deletion.json"
    for each, offset in ((topic, 2), (stage.tiered, 10)):
        partition = {"topic": each, "partition": 0, "offset": offset}
        deletion.write_text(json.dumps({"version": 1, "partitions": [partition]}))
        deleted = stage.through_proxy(f"kafka-delete-records --offset-json-file {deletion}")
        assert f"low_watermark: {offset}" in deleted
        earliest = stage.through_proxy(f"kafka-get-offsets --topic {each} --time earliest")
        assert earliest.split() == [f"{each}:0:{offset}"]
    stage.through_proxy(f"kafka-topics --delete --topic {topic}")
    # The broker learns of the deletion shortly after the controller.
    until(lambda: topic not in stage.through_proxy("kafka-topics --list").split())


def test_versions_are_those_of_the_broker_but_for_what_is_hidden(stage: Stage) -> None:
    proxied, direct = stage.both("kafka-broker-api-versions")
    rows = [{key(row): row for row in found.output.splitlines()} for found in (proxied, direct)]
    assert proxied.output.startswith("BROKER (id: 1 ")
    assert rows[0].keys() == rows[1].keys()
    differ = {each: rows[0][each] for each in rows[0] if rows[0][each] != rows[1][each]}
    assert "0 to 3" in differ.pop(str(int(ApiKey.ADD_PARTITIONS_TO_TXN)))  # later versions are for brokers alone
    assert {int(each) for each in differ} <= {int(each) for each in HIDDEN_APIS}
    assert all("UNSUPPORTED" in row for row in differ.values())


def key(row: str) -> str:
    """Returns the API key of a row, or the row itself if it has none."""
    found = re.search(r"\((\d+)\):", row)
    return found[1] if found else row


def test_a_stored_segment_is_a_segment_to_the_tool_that_reads_them(stage: Stage) -> None:
    stored = sorted((stage.folder / "tier").glob("*/*/*/0/*.log"))[-1]
    first, last = (int(offset) for offset in stored.name.split("-")[:2])
    segment = stage.folder / f"{first:020}.log"
    segment.write_bytes(stored.read_bytes())
    done = stage.tools.run("kafka-dump-log", None, "--files", str(segment), "--deep-iteration")
    assert done.exit_code == 0
    assert [int(offset) for offset in re.findall(r"\| offset: (\d+) ", done.output)] == [*range(first, last + 1)]
    assert set(re.findall(r"isvalid: (\w+)", done.output)) == {"true"}
