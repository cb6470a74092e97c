"""Runs Kafka's command-line tools in one Java process, since a process of its own takes a tool seconds to start."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.clients.java_process import JavaProcess

TOOLS = {
    "kafka-acls": "org.apache.kafka.tools.AclCommand",
    "kafka-broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "kafka-client-metrics": "org.apache.kafka.tools.ClientMetricsCommand",
    "kafka-cluster": "org.apache.kafka.tools.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-consumer-perf-test": "org.apache.kafka.tools.ConsumerPerformance",
    "kafka-delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "kafka-delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-dump-log": "org.apache.kafka.tools.DumpLogSegments",
    "kafka-features": "org.apache.kafka.tools.FeatureCommand",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-groups": "org.apache.kafka.tools.GroupsCommand",
    "kafka-leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "kafka-log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "kafka-metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "kafka-producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-share-consumer-perf-test": "org.apache.kafka.tools.ShareConsumerPerformance",
    "kafka-share-groups": "org.apache.kafka.tools.consumer.group.ShareGroupCommand",
    "kafka-streams-application-reset": "org.apache.kafka.tools.StreamsResetter",
    "kafka-streams-groups": "org.apache.kafka.tools.streams.StreamsGroupCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-verifiable-consumer": "org.apache.kafka.tools.VerifiableConsumer",
}
"""The class of each tool, by the name of the script."""


class ToolResult(NamedTuple):
    exit_code: int
    output: str
    errors: str


class KafkaTools:
    """Runs tools. There is no deadline: a tool that hangs blocks its caller."""

    def __init__(self, *, options: Sequence[str] = (), heap_mib: int = 256) -> None:
        self._process = JavaProcess("ToolRunner", options=options, heap_mib=heap_mib)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, script: str, bootstrap: str | None, *args: str, stdin: str = "") -> ToolResult:
        if bootstrap is not None:
            server = ("--bootstrap-server", bootstrap)
            # Most tools accept the option anywhere. A tool with subcommands accepts it only before or only behind them.
            args = (*args, *server) if script == "kafka-cluster" else (*server, *args)
        words = [TOOLS[script], base64.b64encode(stdin.encode()).decode(), *args]
        code, output, errors = self._process.ask("\t".join(words)).decode().split("\n")[:3]
        return ToolResult(int(code), _text(output), _text(errors))

    def stop(self) -> None:
        self._process.stop()


def _text(answer: str) -> str:
    return base64.b64decode(answer).decode(errors="replace")
