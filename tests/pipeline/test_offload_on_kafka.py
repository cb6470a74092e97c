"""An offload of real topics copies the log once, also when the log changes between the plan and the commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from pipeline.offload.driver import OffloadOptions
from pipeline.offload.job import plan_offload
from pipeline.offload.task import OffloadResult, OffloadTask
from tests.support.pipeline.offload_rig import (
    CLAIM_TIMEOUT_MS,
    OffloadRig,
    check_all_is_remote_once,
    filled,
    in_process,
    offload_rig,
)
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.waiting import until
from tests.support.servers.faulty_s3 import Answer, FaultyS3
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TIMEOUT_S,
    TopicWith,
    create_topic,
    delete_topic,
    produce,
    produce_transaction,
    random_values,
)
from tests.support.servers.tidegate import tidegate_over
from tests.support.servers.versitygw import VersityGateway
from tiers.access.open_tier import RemoteTierError

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


def test_a_first_load_creates_the_metadata_topic_unless_segments_exist(
    kafka_of_three: KafkaCluster, topic_name: str, topic_with: TopicWith, tmp_path: Path
) -> None:
    topic_with(100)
    rig = offload_rig(kafka_of_three, tmp_path, topic_name)
    first = replace(rig, text=rig.text.replace("__metadata-", "__first-"))
    (planned,) = plan_offload(first.config, OffloadOptions(max_age_ms=0))
    assert (planned.first_offset, planned.next_offset) == (0, 100)
    assert f"__first-{topic_name}" not in topics(kafka_of_three)
    assert rig.objects() == []
    assert first.offload().troubles == []
    until(lambda: f"__first-{topic_name}" in topics(kafka_of_three))
    looked = first.look()
    assert looked.remote_bytes == looked.log_bytes
    lost = replace(rig, text=rig.text.replace("__metadata-", "__lost-"))
    with pytest.raises(RemoteTierError, match="the store holds segments of this cluster"):
        plan_offload(lost.config, OffloadOptions(max_age_ms=0))
    with pytest.raises(RemoteTierError, match="the store holds segments of this cluster"):
        lost.offload()
    assert f"__lost-{topic_name}" not in topics(kafka_of_three)


def topics(kafka: KafkaCluster) -> set[str]:
    return set(AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=TIMEOUT_S).topics)


BUCKET = "offload-in-trouble"
ANSWERS = [
    *(Answer.SLOW_DOWN, Answer.SLOW_DOWN),
    *(Answer.PASSED, Answer.PASSED, Answer.STORED_BUT_ERROR, Answer.PASSED, Answer.CONFLICT),
    *(Answer.PASSED, Answer.PRECONDITION),
    *(Answer.PASSED, Answer.PASSED, Answer.SLOW),
    *(Answer.PASSED, Answer.INTERNAL_ERROR, Answer.INTERNAL_ERROR),
]


def test_after_faults_of_the_store_every_record_is_stored_once(
    kafka_of_three: KafkaCluster, s3: VersityGateway, topic_name: str, topic_with: TopicWith, tmp_path: Path
) -> None:
    topic_with(200)
    asyncio.run(s3.create_bucket(BUCKET))
    with FaultyS3(s3.endpoint_url) as faulty:
        settings = {**s3.settings(BUCKET), "endpoint.url": faulty.url, "timeout.ms": "5000"}
        section = ["[storage]", 'implementation = "s3"', *(f'{key} = "{value}"' for key, value in settings.items())]
        rig = offload_rig(kafka_of_three, tmp_path, topic_name, "\n".join(section))
        rig = replace(rig, stored=s3.folder / "data" / BUCKET)
        faulty.answers.extend(ANSWERS)
        report = rig.offload()
        assert report.troubles == []
        assert not faulty.answers
        assert report.waves > 1, "no fault cost more than a retry of its request"
        assert report.partitions[0].segments == 4
        check_all_is_remote_once(rig)
