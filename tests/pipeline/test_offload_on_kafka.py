"""Offload of real topics: what it copies is the log, once, whatever happens between the plan and the commit."""

from __future__ import annotations

from pathlib import Path

from pipeline.jobs.offload import OffloadOptions, plan_offload
from tests.pipeline.offload_rig import OffloadRig, offload_rig
from tests.servers.kafka import KafkaCluster
from tests.servers.producing import create_topic, produce, produce_transaction, random_values


def filled(kafka: KafkaCluster, folder: Path, topic: str, partitions: int = 1, records: int = 300) -> OffloadRig:
    create_topic(kafka.bootstrap_servers, topic, partitions=partitions)
    for partition in range(partitions):
        produce(kafka.bootstrap_servers, topic, random_values(records), partition=partition)
    return offload_rig(kafka, folder, topic)


def check_all_is_remote_once(rig: OffloadRig, partition: int = 0) -> None:
    looked = rig.look(partition)
    assert looked.remote_bytes == looked.log_bytes
    assert looked.unfinished == []
    ends = [end for _, end in looked.ranges]
    assert [start for start, _ in looked.ranges] == [0, *(end + 1 for end in ends[:-1])]


def test_offload_copies_what_the_brokers_have_and_nothing_twice(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    bootstrap = kafka_of_three.bootstrap_servers
    rig = filled(kafka_of_three, tmp_path, topic_name, partitions=2)
    for number in range(6):
        produce_transaction(
            bootstrap, topic_name, random_values(20), transactional_id=topic_name, commit=number % 2 == 0
        )
    report = rig.offload()
    assert report.troubles == []
    assert [one.next_offset for one in report.partitions] == [300 + 6 * 21, 300]
    for partition in (0, 1):
        check_all_is_remote_once(rig, partition)
    looked = rig.look(0)
    assert len(looked.segments) == report.partitions[0].segments >= 4
    assert any(not one.txn_index_empty for one in looked.segments)
    assert plan_offload(rig.config, OffloadOptions(max_age_ms=0)) == []
    assert rig.offload().waves == 0
    assert rig.look(0) == looked
