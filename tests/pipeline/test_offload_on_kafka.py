"""An offload of real topics copies the log once, also when the log changes between the plan and the commit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import pipeline.offload.task
from pipeline.offload.driver import OffloadDriver, OffloadOptions
from pipeline.offload.job import plan_offload
from pipeline.offload.task import OffloadResult, OffloadTask, Stop, Stopped
from protocol.records.record_batch import iterate_batches
from tests.support.pipeline.offload_rig import (
    CLAIM_TIMEOUT_MS,
    OffloadRig,
    check_all_is_remote_once,
    filled,
    in_process,
)
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TIMEOUT_S,
    TopicWith,
    create_topic,
    delete_topic,
    produce,
    produce_transaction,
    random_values,
    topic_id_partition,
)
from tests.support.servers.tidegate import tidegate_over
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.errors import RetriableRemoteStorageError
from tiers.log.broker_log import BrokerLogSource
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.segment_copy import write_objects
from tiers.tasks.copy.spool import Spool

pytestmark = pytest.mark.integration
OPTIONS = OffloadOptions(max_age_ms=0, failure_pause_s=0, claim_timeout_ms=CLAIM_TIMEOUT_MS)


@pytest.fixture(autouse=True)
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is given up waits for a heartbeat that is late, however late it is."""
    monkeypatch.setattr("pipeline.offload.commit._OWNED_STILL_MS", CLAIM_TIMEOUT_MS)


@pytest.fixture
def rig(kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path) -> OffloadRig:
    """One partition of four tiles or so."""
    return filled(kafka_of_three, tmp_path, topic_name)


def test_offload_copies_what_the_brokers_have_and_nothing_twice(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    bootstrap = kafka_of_three.bootstrap_servers
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2, records=300)
    for number in range(6):
        produce_transaction(
            bootstrap, topic_name, random_values(20), transactional_id=topic_name, commit=number % 2 == 0
        )
    report = rig.offload()
    assert report.troubles == []
    assert [one.next_offset for one in report.partitions] == [300 + 6 * 21, 300]
    check_all_is_remote_once(rig, 0, 1)
    looked = rig.look(0)
    assert len(looked.segments) == report.partitions[0].segments >= 4
    assert any(not one.txn_index_empty for one in looked.segments)
    assert plan_offload(rig.config, OPTIONS) == []
    assert rig.offload().waves == 0
    assert rig.look(0) == looked


def test_a_small_young_end_is_left_and_a_run_ends_at_its_limit(rig: OffloadRig) -> None:
    (planned,) = plan_offload(rig.config, OffloadOptions())
    assert (planned.first_offset, planned.segments) == (0, 3)
    some = OffloadOptions(wave_bytes=100_000, claim_timeout_ms=CLAIM_TIMEOUT_MS)
    first = rig.offload(options=replace(some, max_bytes=1))
    assert first.partitions[0].segments == 1
    second = rig.offload(options=some)
    assert second.partitions[0].segments == 2
    assert 0 < 200 - second.partitions[0].next_offset < 60
    looked = rig.look()
    assert looked.log_bytes.startswith(looked.remote_bytes)


async def test_brokers_tell_what_their_logs_take(
    kafka_of_three: KafkaCluster, topic_name: str, topic_with: TopicWith
) -> None:
    topic_with(100)
    client = BrokerClient([kafka_of_three.address()], client_id="test")
    try:
        partition, source = await topic_id_partition(client, topic_name), BrokerLogSource(client)
        # A broker that has no time for it does not answer.
        while (size_bytes := await source.size_bytes(partition, 30_000)) is None:
            pass
    finally:
        await client.close()
    assert 100_000 < size_bytes < 110_000


def test_a_store_that_fails_is_asked_again_and_leaves_nothing(rig: OffloadRig, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0

    async def fails_at_first(
        storage: RemoteStorageManager,
        spool: Spool,
        key_ring: KeyRing,
        built: BuiltSegment,
        segment: RemoteLogSegmentMetadata,
    ) -> bytes | None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RetriableRemoteStorageError("503 before anything was written")
        custom_metadata = await write_objects(storage, spool, key_ring, built, segment)
        if attempts == 3:
            raise RetriableRemoteStorageError("500 after all was written")
        if attempts == 4:
            (log,) = (rig.folder / "remote").rglob(f"*{segment.segment_id.id}*.log")
            log.write_bytes(b"x" + log.read_bytes()[1:])
        return custom_metadata

    monkeypatch.setattr(pipeline.offload.task, "write_objects", fails_at_first)
    report = rig.offload()
    assert report.troubles == []
    assert report.waves == 4
    check_all_is_remote_once(rig)


def test_the_whole_objects_of_a_lost_attempt_are_finished(rig: OffloadRig) -> None:
    written: list[list[str]] = []

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        results = in_process(tasks)
        written.append(rig.objects())
        lost = [OffloadResult(stopped=Stopped(0, Stop.LOST))]  # what the second attempt says, the first one being dead
        return lost if len(written) == 1 else results

    report = rig.offload(run)
    assert report.partitions[0].lost_attempts == 1
    assert len(written) == report.waves == 1
    assert written[0] == rig.objects() != []
    check_all_is_remote_once(rig)


def test_a_topic_made_again_under_the_name_gets_nothing_of_the_old_one(rig: OffloadRig) -> None:
    bootstrap = rig.kafka.bootstrap_servers

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        results = in_process(tasks)
        assert results[0].copied
        delete_topic(bootstrap, rig.topic)
        create_topic(bootstrap, rig.topic)
        produce(bootstrap, rig.topic, random_values(300))
        return results

    report = rig.offload(run)
    assert report.partitions[0].segments == 0
    assert "topic id" in report.partitions[0].error
    old = rig.objects()  # the owner deletes them when it knows that their topic is gone
    rig.offload()
    check_all_is_remote_once(rig, others=old)


def test_one_of_two_drivers_waits_and_gives_up(rig: OffloadRig) -> None:
    copied, go_on = threading.Event(), threading.Event()

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        results = in_process(tasks)
        copied.set()
        assert go_on.wait(TIMEOUT_S)
        return results

    reports = []
    first = threading.Thread(target=lambda: reports.append(rig.offload(run)))
    first.start()
    try:
        assert copied.wait(TIMEOUT_S)
        with pytest.raises(RemoteTierError, match="another job runs on the same topics"):
            rig.offload(options=replace(OPTIONS, claim_timeout_ms=4_000))
    finally:
        go_on.set()
        first.join()
    assert [one.troubles for one in reports] == [[]]
    check_all_is_remote_once(rig)


def test_a_driver_that_slept_counts_what_another_owner_finished(
    rig: OffloadRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = OffloadDriver.commit
    slept: list[str] = []

    async def commit_late(self: OffloadDriver, results: Sequence[OffloadResult]) -> None:
        slept.extend(rig.objects())
        await self.abandon()  # as every owner does with copies that do not end
        await commit(self, results)

    monkeypatch.setattr(OffloadDriver, "commit", commit_late)
    report = rig.offload()
    assert slept == rig.objects() != []
    assert report.waves == 1
    assert report.troubles == []
    assert report.partitions[0].segments == len(rig.look().segments)
    check_all_is_remote_once(rig)


def test_an_interrupted_run_finishes_its_whole_copies_and_its_ownership(rig: OffloadRig) -> None:
    written: list[str] = []

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        in_process(tasks)
        written.extend(rig.objects())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.offload(run)
    assert written == rig.objects() != []
    check_all_is_remote_once(rig)
    assert rig.offload().waves == 0


def test_a_damaged_batch_stops_its_partition_there_and_no_other(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2)
    logs = [broker.logs / f"{topic_name}-0" / f"{0:020}.log" for broker in kafka_of_three.brokers.values()]
    (log,) = filter(Path.exists, logs)
    batches = list(iterate_batches(log.read_bytes()))
    damaged = next(batch for batch in batches if batch.base_offset >= 130)
    with log.open("r+b") as file:
        file.seek(damaged.end - 1)
        last = file.read(1)[0]
        file.seek(damaged.end - 1)
        file.write(bytes([last ^ 1]))
    report = rig.offload()
    assert [one.next_offset for one in report.partitions] == [damaged.base_offset, 200]
    (trouble,) = report.troubles
    assert f"offset {damaged.base_offset}" in trouble.error
    looked = rig.look(1)
    assert looked.remote_bytes == looked.log_bytes
    assert rig.offload().partitions[0].segments == 0


def test_proxies_copy_beside_it_and_clients_read_everything(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    bootstrap = kafka_of_three.bootstrap_servers
    create_topic(bootstrap, topic_name, partitions=3)
    values = {partition: random_values(400) for partition in range(3)}
    settings: dict[str, str | int] = {"remote.log.metadata.topic.name": f"__metadata-{topic_name}"}
    # The proxy copies whole segments alone: their ends are always left for the job.
    rule = f'[[topics]]\nname = "{topic_name}"\nlocal.retention.bytes = 1\nsegment.bytes = 60000\nsegment.ms = "1h"\n'
    proxy = tidegate_over(kafka_of_three, tmp_path, settings=settings, more=rule)

    def produce_all() -> None:
        for first in range(0, 400, 50):
            for partition in range(3):
                produce(bootstrap, topic_name, values[partition][first : first + 50], partition=partition)

    with proxy:
        rig = OffloadRig(kafka_of_three, tmp_path, topic_name, proxy.config.read_text())
        producing = threading.Thread(target=produce_all)
        producing.start()
        offloaded = 0
        while producing.is_alive() or offloaded == 0:
            report = rig.offload()
            assert report.troubles == []
            offloaded += sum(one.segments for one in report.partitions)
        producing.join()
        for partition in range(3):
            ranges = rig.look(partition).ranges
            assert [start for start, _ in ranges] == [0, *(end + 1 for _, end in ranges[:-1])]
        for partition, produced in values.items():
            with consumer_at(proxy.bootstrap_servers, topic_name, 0, partition) as consumer:
                assert read(consumer, 400) == list(enumerate(produced))
