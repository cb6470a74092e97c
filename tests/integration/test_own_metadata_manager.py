"""A proxy over the example `docs/examples/sqlite-metadata`. Keys of docs/founding.md choose both managers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import confluent_kafka.admin
import pytest

from tests.support.examples import install_example
from tests.support.repository import ROOT
from tests.support.rigs.strict_consumer import RECORD, consumer_at, read, until_trimmed
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

RECORDS = 2_000


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("sqlite-metadata", tmp_path / "site-packages")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site-packages'}:{ROOT}")


def proxy_over_sqlite(
    kafka: KafkaCluster, folder: Path, topic: str, *, name: str = "sqlite", state: str = "home"
) -> TidegateProcess:
    (folder / "tier").mkdir(exist_ok=True)
    settings: dict[str, str | int] = {
        "remote.log.storage.manager.class.name": "tiers.storage.local:LocalRemoteStorageManager",
        "remote.log.storage.path": str(folder / "tier"),
        "remote.log.metadata.manager.class.name": name,
        "remote.log.metadata.path": str(folder / "metadata.sqlite"),
        "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
        "remote.log.visible.after.ms": 2000,
    }
    return tidegate_over(kafka, folder / state, tiered=[topic], segment_bytes=200_000, storage={}, settings=settings)


async def backfilled(proxy: TidegateProcess, topic: str, count: int) -> list[RECORD]:
    def read_all() -> list[RECORD]:
        with consumer_at(proxy.bootstrap_servers, topic, 0) as consumer:
            return read(consumer, count)

    return await asyncio.to_thread(read_all)


@pytest.mark.full
async def test_produce_copy_trim_and_backfill_over_sqlite_survive_a_crash(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    values = random_values(RECORDS)
    with proxy_over_sqlite(kafka, tmp_path, topic_name) as proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values[: RECORDS // 2])
        trimmed = await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 4)
        assert await backfilled(proxy, topic_name, RECORDS // 2) == list(enumerate(values[: RECORDS // 2]))

        os.kill(proxy.pid, signal.SIGKILL)
        await asyncio.to_thread(proxy.wait)
        shutil.rmtree(tmp_path / "home" / "state")
        await asyncio.to_thread(proxy.start)
        assert await backfilled(proxy, topic_name, RECORDS // 2) == list(enumerate(values[: RECORDS // 2]))
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, values[RECORDS // 2 :])
        assert await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS * 3 // 4) > trimmed
        assert await backfilled(proxy, topic_name, RECORDS) == list(enumerate(values))
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    topics = await asyncio.to_thread(admin.list_topics, timeout=60)
    assert f"__metadata-{topic_name}"[:200] not in topics.topics


@pytest.mark.full
async def test_a_second_proxy_over_the_same_file_ends_with_an_error(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    with proxy_over_sqlite(kafka, tmp_path, topic_name, name="sqlite_metadata:SqliteRecordLog"):
        second = proxy_over_sqlite(kafka, tmp_path, topic_name, state="another")
        with pytest.raises(ServerUnavailable, match=r"held by another proxy .* Stop the other proxy first"):
            await asyncio.to_thread(second.start)
        shutil.rmtree(second.folder)
