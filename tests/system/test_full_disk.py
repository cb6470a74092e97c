"""The disk under one proxy's state is full: the other proxy copies its partitions. The disk is a small tmpfs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.tiers.waiting import until
from tiers.storage.object_key import parse_segment_key

pytestmark = pytest.mark.integration

PARTITIONS = 8
METADATA_PARTITIONS = 4
RECORDS = 60
COPIED_WITHIN_S = 30.0


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Writes until the file system refuses."""
    descriptor = os.open(disk / "filling", os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, b"\0" * 4096)
    finally:
        os.close(descriptor)
    assert os.statvfs(disk).f_bavail == 0


def owned(proxy: TidegateProcess) -> int:
    return int(proxy.metric("tidegate_remote_log_metadata_owned"))


def copied(tier: Path) -> dict[int, int]:
    """Returns the highest offset of each partition that has a complete segment in the store."""
    highest: dict[int, int] = {}
    for path in tier.rglob("*.indexes"):
        key = parse_segment_key(str(path.relative_to(tier)))
        if key is not None:
            highest[key.partition] = max(key.end_offset, highest.get(key.partition, -1))
    return highest


async def test_a_proxy_with_a_full_disk_hands_its_partitions_over(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    storage = {"implementation": "local", "path": str(tier)}
    settings: dict[str, str | int] = {"remote.log.metadata.topic.name": f"metadata-of-{topic_name}"}
    create_topic(kafka.bootstrap_servers, topic_name, partitions=PARTITIONS)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "sick" / "state"))
        sick, well = (
            stack.enter_context(
                tidegate_over(
                    kafka,
                    tmp_path / name,
                    tiered=[topic_name],
                    segment_bytes=20_000,
                    storage=storage,
                    settings=settings,
                )
            )
            for name in ("sick", "well")
        )
        await until(lambda: [owned(sick), owned(well)] == [METADATA_PARTITIONS // 2] * 2)
        fill(disk)
        for partition in range(PARTITIONS):
            produce(well.bootstrap_servers, topic_name, random_values(RECORDS), partition=partition)
        await until(
            lambda: len(copied(tier)) == PARTITIONS and owned(well) == METADATA_PARTITIONS, timeout_s=COPIED_WITHIN_S
        )
        assert owned(sick) == 0
        assert sick.metric("tidegate_unfit") == 1
        assert "this process cannot work as an owner" in sick.output.read_text()
        assert sick.running
