"""The first offload of a cluster creates the metadata topic, unless the store has segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from pipeline.offload.driver import OffloadOptions
from pipeline.offload.job import plan_offload
from tests.support.pipeline.offload_rig import offload_rig
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TIMEOUT_S, TopicWith
from tiers.access.open_tier import RemoteTierError


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
