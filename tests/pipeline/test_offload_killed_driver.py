"""A killed driver costs time. The next driver finishes its work, and every object that it left has a name."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pipeline import killed_driver
from tests.support.pipeline.killed_driver import PLACES
from tests.support.pipeline.offload_rig import OffloadRig, check_all_is_remote_once, offload_rig
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import filled_topic
from tiers.model.segment_metadata import RemoteLogSegmentMetadata


@pytest.mark.integration
def test_a_killed_driver_leaves_no_object_without_a_name(
    kafka_of_three: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """All three at a time: what takes long is that the group and the transactions wait for the dead."""
    rigs = {where: rig_of(kafka_of_three, tmp_path / where, f"{topic_name}-{where}") for where in PLACES}
    drivers = [sys.executable, "-m", killed_driver.__name__, str(tmp_path)]
    ended = subprocess.run(drivers, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    left = {where: rig.look() for where, rig in rigs.items()}
    assert [len(looked.segments) for looked in left.values()] == [0, 1, 4]
    for rig in rigs.values():
        assert len(rig.objects()) == 8
        assert rig.unnamed() == []
    with ThreadPoolExecutor() as threads:
        for report in threads.map(OffloadRig.offload, rigs.values()):
            assert report.troubles == []
    for where, rig in rigs.items():
        check_all_is_remote_once(rig)
        assert rig.look().segments[: len(left[where].segments)] == left[where].segments
    committed: list[RemoteLogSegmentMetadata] = left["behind"].segments
    assert rigs["behind"].look().segments == committed


def rig_of(kafka: KafkaCluster, folder: Path, topic: str) -> OffloadRig:
    """One partition of four tiles."""
    folder.mkdir()
    filled_topic(kafka.bootstrap_servers, topic, 200)
    rig = offload_rig(kafka, folder, topic)
    rig = replace(rig, text=rig.text.replace("*", ""))
    (folder / "config.toml").write_text(rig.text)
    return rig
