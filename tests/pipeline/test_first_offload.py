"""A first load: nothing was tiered yet, so the offload makes the metadata topic; but never beside segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.pipeline.offload_rig import offload_rig
from tests.servers.kafka import KafkaCluster
from tests.servers.producing import create_topic, produce, random_values
from tiers.open_tier import RemoteTierError


def test_a_first_load_makes_the_metadata_topic_unless_the_store_has_segments(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka_of_three.bootstrap_servers, topic_name)
    produce(kafka_of_three.bootstrap_servers, topic_name, random_values(100))
    rig = offload_rig(kafka_of_three, tmp_path, topic_name)
    first = replace(rig, text=rig.text.replace("__metadata-", "__first-"))
    assert first.offload().troubles == []
    looked = first.look()
    assert looked.remote_bytes == looked.log_bytes
    lost = replace(rig, text=rig.text.replace("__metadata-", "__lost-"))
    with pytest.raises(RemoteTierError, match="the store holds segments of this cluster"):
        lost.offload()
