"""Kafka's own tiered storage scenarios (org.apache.kafka.tiered.storage.integration), against a proxy whose brokers
have no tier.

Each row has the name of Kafka's test. Differences from Kafka's tests have one of these reasons:

* The newest segment always stays local: the local log starts at its base offset, not behind it.
* The proxy cuts segments, not the broker: a batch is remote when the next one does not fit into its segment.
* Brokers keep no remote indexes, and followers build nothing from the tier. A new replica copies only local records,
  and the proxy still serves the remote ones.
* A remote fetch is one ranged read of a segment's object. Each segment is read at most once, since it stays cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.rigs.conformance_stage import (
    BEGINNING_MS,
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    Action,
    Stage,
    add_partitions,
    alter,
    bounce_brokers,
    bounce_proxy,
    conformance_proxy,
    consume,
    create,
    delete_records,
    delete_topic,
    expect_local_start,
    expect_no_objects,
    expect_no_remote_segments,
    expect_offset,
    expect_segments,
    move_log_dir,
    move_replicas,
    produce,
)
from tests.support.servers.kafka import SHORT_LIVED, KafkaCluster
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Scenario:
    name: str
    actions: tuple[Action, ...]


def copied_and_read_after_a_move(*moves: Action) -> tuple[Action, ...]:
    """Produces half of the records before the replicas move, and half after. Reads all from the new leader's port."""
    return (
        create("one", replicas=[1]),
        produce(4),
        expect_segments((0, 0), (1, 1), (2, 2)),
        expect_local_start(2),
        *moves,
        produce(2),
        expect_segments((0, 0), (1, 1), (2, 2), (3, 3), (4, 4)),
        expect_local_start(4),
        consume(0, 6, remote_fetches=4),
    )


SCENARIOS = [
    Scenario(
        # The proxy is restarted instead of the broker, since the proxy keeps the state.
        "OffloadAndConsumeFromLeaderTest-1-batch-per-segment",
        (
            create("one"),
            produce(4),
            expect_segments((0, 0), (1, 1), (2, 2)),
            expect_local_start(2),
            bounce_proxy(),
            consume(0, 4, remote_fetches=2),
        ),
    ),
    Scenario(
        "OffloadAndConsumeFromLeaderTest-2-batches-per-segment",
        (
            create("two"),
            produce(7),
            expect_segments((0, 1), (2, 3), (4, 5)),
            expect_local_start(4),
            consume(1, 6, remote_fetches=2),
            consume(1, 6, remote_fetches=0),
        ),
    ),
    Scenario(
        # In Kafka's test all four batches are only remote. Here the fourth is remote and also stays local.
        "RollAndOffloadActiveSegmentTest",
        (
            create("aged"),
            produce(4),
            expect_segments((0, 0), (1, 1), (2, 2), (3, 3)),
            expect_local_start(3),
            consume(0, 4, remote_fetches=3),
        ),
    ),
    Scenario(
        "EnableRemoteLogOnTopicTest",
        (
            create("plain", partitions=2),
            produce(3, 0),
            produce(3, 1),
            expect_no_remote_segments(0),
            alter(remote_storage_enable="true", local_retention_bytes="1"),
            produce(1, 0),
            expect_segments((0, 0), (1, 1), (2, 2), partition=0),
            expect_segments((0, 0), (1, 1), partition=1),
            expect_local_start(2, 0),
            expect_local_start(1, 1),
            consume(0, 4, remote_fetches=2, partition=0),
            consume(0, 3, remote_fetches=1, partition=1),
        ),
    ),
    Scenario(
        # Tasks learn of new settings within seconds. A restart makes sure that they know them before the next records.
        "DisableRemoteLogOnTopicTest",
        (
            create("plain"),
            alter(remote_storage_enable="true", local_retention_bytes="1"),
            produce(4),
            expect_segments((0, 0), (1, 1), (2, 2)),
            expect_local_start(2),
            alter(remote_log_copy_disable="true", local_retention_bytes="-2"),
            bounce_proxy(),
            produce(2),
            consume(0, 6, remote_fetches=2),
            delete_records(1),
            expect_segments((1, 1), (2, 2)),
            expect_offset(EARLIEST, 1),
            alter(remote_log_copy_disable="false", local_retention_bytes="1"),
            expect_segments((1, 1), (2, 2), (3, 3), (4, 4)),
            expect_local_start(4),
            alter(remote_storage_enable="false", remote_log_delete_on_disable="true"),
            expect_no_remote_segments(),
            expect_offset(EARLIEST, 4),
            consume(4, 2, remote_fetches=0),
        ),
    ),
    Scenario(
        # Timestamps in the remote tier, in both tiers, and only in the local tier, with two leader epochs.
        "ListOffsetsTest",
        (
            create("two", replicas=[1, 2]),
            produce(5),
            expect_segments((0, 1), (2, 3)),
            expect_local_start(2),
            expect_offset(EARLIEST, 0, 0),
            expect_offset(EARLIEST_LOCAL, 2, 0),
            expect_offset(LATEST_TIERED, 3, 0),
            expect_offset(LATEST, 5, 0),
            expect_offset(BEGINNING_MS - 1, 0, 0),
            expect_offset(BEGINNING_MS + 1000, 1, 0),
            expect_offset(BEGINNING_MS + 1001, 2, 0),
            expect_offset(BEGINNING_MS + 4000, 4, 0),
            expect_offset(BEGINNING_MS + 4001, -1, -1),
            expect_offset(MAX_TIMESTAMP, 4, 0),
            move_replicas(2, 1),
            produce(2),
            expect_segments((0, 1), (2, 3), (4, 5)),
            expect_local_start(4),
            expect_offset(EARLIEST, 0, 0),
            expect_offset(BEGINNING_MS + 4000, 4, 0),
            expect_offset(LATEST, 7),
            delete_records(1),
            expect_offset(EARLIEST, 1, 0),
            expect_offset(BEGINNING_MS - 1, 1, 0),
            delete_records(5),
            expect_segments((4, 5)),
            expect_offset(EARLIEST, 5),
            expect_offset(LATEST_TIERED, 5),
            expect_offset(BEGINNING_MS, 5),
        ),
    ),
    Scenario(
        # The broker enforces the same setting on its last segment too. In Kafka's test the fourth record stays.
        "DeleteSegmentsByRetentionTimeTest",
        (
            create("one"),
            produce(4),
            expect_segments((0, 0), (1, 1), (2, 2)),
            expect_local_start(2),
            alter(retention_ms="1"),
            expect_no_remote_segments(),
            expect_offset(EARLIEST, 4),
            alter(retention_ms="-1"),
            produce(1),
            consume(4, 1, remote_fetches=0),
        ),
    ),
    Scenario(
        # The log without the last remote segment still has the fourth record, which is not remote. As in Kafka, its
        # bytes count, so all remote segments expire.
        "DeleteSegmentsByRetentionSizeTest",
        (
            create("one"),
            produce(4),
            expect_segments((0, 0), (1, 1), (2, 2)),
            expect_local_start(2),
            alter(retention_bytes="1"),
            expect_no_remote_segments(),
            expect_offset(EARLIEST, 3),
            expect_local_start(3),
            consume(3, 1, remote_fetches=0),
        ),
    ),
    Scenario(
        "DeleteSegmentsDueToLogStartOffsetBreachTest",
        (
            create("two", replicas=[1, 2]),
            produce(7),
            expect_segments((0, 1), (2, 3), (4, 5)),
            expect_local_start(4),
            delete_records(3),
            expect_segments((2, 3), (4, 5)),
            expect_offset(EARLIEST, 3, 0),
            consume(3, 4, remote_fetches=1),
            move_replicas(2, 1),
            produce(2),
            expect_segments((2, 3), (4, 5), (6, 7)),
            expect_local_start(6),
            delete_records(5),
            expect_segments((4, 5), (6, 7)),
            expect_offset(EARLIEST, 5, 0),
            consume(5, 4, remote_fetches=1),
        ),
    ),
    Scenario(
        "DeleteTopicTest",
        (
            create("one", partitions=2),
            produce(3, 0),
            produce(3, 1),
            expect_segments((0, 0), (1, 1), partition=0),
            expect_segments((0, 0), (1, 1), partition=1),
            delete_topic(),
            expect_no_objects(),
        ),
    ),
    Scenario(
        "PartitionsExpandTest",
        (
            create("one"),
            produce(4),
            expect_local_start(2),
            add_partitions(3),
            produce(3, 1),
            produce(1, 2),
            produce(1, 0),
            expect_segments((0, 0), (1, 1), (2, 2), (3, 3), partition=0),
            expect_segments((0, 0), (1, 1), partition=1),
            expect_no_remote_segments(2),
            expect_local_start(3, 0),
            expect_local_start(1, 1),
            consume(0, 5, remote_fetches=3, partition=0),
            consume(0, 3, remote_fetches=1, partition=1),
            consume(0, 1, remote_fetches=0, partition=2),
        ),
    ),
    Scenario("ReassignReplicaExpandTest", copied_and_read_after_a_move(move_replicas(2, 1))),
    Scenario("ReassignReplicaMoveTest", copied_and_read_after_a_move(move_replicas(2))),
    Scenario("ReassignReplicaMoveAndExpandTest", copied_and_read_after_a_move(move_replicas(2), move_replicas(3, 2))),
    Scenario(
        "ReassignReplicaShrinkTest",
        (
            create("one", partitions=2, replicas=[1, 2]),
            produce(3, 0),
            produce(3, 1),
            expect_local_start(1, 0),
            expect_local_start(1, 1),
            move_replicas(2, partition=0),
            move_replicas(1, partition=1),
            produce(1, 0),
            produce(1, 1),
            expect_segments((0, 0), (1, 1), (2, 2), partition=0),
            expect_segments((0, 0), (1, 1), (2, 2), partition=1),
            expect_local_start(2, 0),
            expect_local_start(2, 1),
            consume(0, 4, remote_fetches=2, partition=0),
            consume(0, 4, remote_fetches=2, partition=1),
        ),
    ),
    Scenario(
        # test_semantics_transactions.py has Kafka's whole suite of transactions on tiered topics.
        # Kafka commits three records at the end. Of two, less than half a segment is left, which stays local.
        "TransactionsWithTieredStoreTest",
        (
            create("two"),
            produce(3, transaction="commit"),
            produce(2, transaction="abort"),
            produce(2, transaction="commit"),
            expect_segments((0, 1), (2, 4), (5, 7)),
            expect_local_start(5),
            consume(0, 5, remote_fetches=2),
        ),
    ),
    Scenario(
        # Kafka's test fetches indexes twice per segment. Here one fetch has all aborted transactions of a segment.
        "OffloadAndTxnConsumeFromLeaderTest",
        (
            create("one"),
            produce(1, transaction="abort"),
            produce(1, transaction="commit"),
            produce(1, transaction="commit"),  # as large as the others: sizes are estimates
            produce(1, transaction="commit"),
            expect_segments((0, 1), (2, 3), (4, 5)),
            expect_local_start(4),
            consume(0, 3, remote_fetches=2, index_fetches=3),
        ),
    ),
]
ON_TWO_DISKS = [
    Scenario(
        "AlterLogDirTest",
        (
            create("one"),
            produce(4),
            expect_local_start(2),
            move_log_dir(1, lambda stage: stage.home / "second-disk"),
            produce(1),
            expect_segments((0, 0), (1, 1), (2, 2), (3, 3)),
            expect_local_start(3),
            consume(0, 5, remote_fetches=3),
        ),
    ),
    Scenario(
        "FetchFromLeaderWithCorruptedCheckpointTest",
        (
            create("one"),
            produce(4),
            expect_local_start(2),
            bounce_brokers(
                1,
                forget=("replication-offset-checkpoint", "recovery-point-offset-checkpoint", ".kafka_cleanshutdown"),
            ),
            produce(1),
            expect_segments((0, 0), (1, 1), (2, 2), (3, 3)),
            expect_local_start(3),
            consume(0, 5, remote_fetches=3),
        ),
    ),
]


def name_of(scenario: Scenario) -> str:
    return scenario.name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def proxy(kafka_of_three: KafkaCluster, home: Path) -> Iterator[TidegateProcess]:
    """One proxy for all scenarios. Each scenario has its own topic."""
    with conformance_proxy(kafka_of_three, home, "conformance") as proxy:
        yield proxy


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_scenario(scenario: Scenario, kafka_of_three: KafkaCluster, proxy: TidegateProcess, home: Path) -> None:
    play(scenario, Stage(kafka_of_three, proxy, home, scenario.name))


@pytest.fixture(scope="module")
def two_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaCluster, TidegateProcess, Path]]:
    """A broker for the scenarios of disks only, since they disturb other tests."""
    home = tmp_path_factory.mktemp("two-disks")
    settings = {"log.dirs": f"{home / 'first-disk'},{home / 'second-disk'}"}
    with KafkaCluster(settings=settings, java_options=SHORT_LIVED) as cluster:
        cluster.brokers[1].logs = home
        with conformance_proxy(cluster, home, "two-disks") as proxy:
            yield cluster, proxy, home


@pytest.mark.parametrize("scenario", ON_TWO_DISKS, ids=name_of)
def test_scenario_of_disks(scenario: Scenario, two_disks: tuple[KafkaCluster, TidegateProcess, Path]) -> None:
    cluster, proxy, home = two_disks
    play(scenario, Stage(cluster, proxy, home, scenario.name))


def play(scenario: Scenario, stage: Stage) -> None:
    for number, action in enumerate(scenario.actions, 1):
        try:
            action(stage)
        except BaseException as error:
            error.add_note(f"{scenario.name}, action {number}")
            raise
    delete_topic()(stage)
