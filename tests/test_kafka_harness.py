"""The test harness: the parts that every integration test relies on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.servers.kafka import (
    CONSOLE_CONSUMER,
    CONSOLE_PRODUCER,
    TOPIC_COMMAND,
    Broker,
    KafkaCluster,
)
from tests.support.servers.running_brokers import running_brokers
from tests.support.servers.speaking import said_since

pytestmark = pytest.mark.integration


def test_a_broker_answers_under_the_host_name_that_it_advertises(kafka: KafkaCluster) -> None:
    assert running_brokers(*kafka.address(), timeout_s=60.0) == {1: ("localhost", kafka.address()[1])}


def test_records_written_by_a_console_tool_land_in_the_log_folder(kafka: KafkaCluster, topic_name: str) -> None:
    to_topic = ["--bootstrap-server", kafka.bootstrap_servers, "--topic", topic_name]
    kafka.run_tool(TOPIC_COMMAND, *to_topic, "--create")
    kafka.run_tool(CONSOLE_PRODUCER, *to_topic, stdin="one\ntwo\n")

    read = kafka.run_tool(CONSOLE_CONSUMER, *to_topic, "--from-beginning", "--max-messages", "2")

    assert read.stdout.split() == ["one", "two"]
    assert b"one" in (kafka.log_folder(topic_name, 0) / f"{0:020}.log").read_bytes()


def test_a_killed_broker_comes_back_on_its_port(kafka_of_three: KafkaCluster) -> None:
    before = kafka_of_three.address(2)
    kafka_of_three.kill_broker(2)
    kafka_of_three.start_broker(2)

    assert running_brokers(*before, timeout_s=60.0)[2] == before


def test_a_dead_broker_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    broker = Broker(1, tmp_path, "said.example", 9092, 9093)
    broker.output.write_text("first\nlast\n")
    told = dict(said_since(broker.output.stat().st_mtime))

    assert told["broker at said.example:9092, which does not run"] == "first\nlast"
    assert "broker at said.example:9092, which does not run" not in dict(said_since(time.time() + 1))
