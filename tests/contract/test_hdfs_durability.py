"""What HDFS has made durable before a copy counts, on a real NameNode and real DataNodes (docs/design.md, "Durability
and deadlines")."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.hdfs import SUPERUSER, HdfsCluster
from tests.support.servers.stores import opened
from tiers.errors import RemoteResourceNotFoundError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage import hdfs as hdfs_store
from tiers.storage.remote_storage_manager import LogSegmentData, check_by_an_object

MIB = 1 << 20
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def superuser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", SUPERUSER)


def segment(folder: Path, value_bytes: int) -> tuple[RemoteLogSegmentMetadata, LogSegmentData]:
    built = build_segment(folder / "log", [batch_of(0, 1, value_bytes=value_bytes)])
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


async def test_a_copy_syncs_both_files_as_a_whole(hdfs: HdfsCluster, tmp_path: Path) -> None:
    """One sync reaches one block, and the block that it reaches must be the whole file."""
    metadata, data = segment(tmp_path, 5 * MIB)
    settings = hdfs.settings("/durable/synced")
    async with opened("hdfs", settings) as storage:
        before = hdfs.synced()
        await storage.copy_log_segment_data(metadata, data)
        async with asyncio.timeout(PATIENCE_S):
            while hdfs.synced() < before + 2:  # noqa: ASYNC110  # a DataNode counts without an event, and tells it late
                await asyncio.sleep(0.5)
        assert await storage.fetch_log_segment(metadata, 0) == data.log_segment.read_bytes()
        keys = [stored.key async for stored in storage.list_objects("")]
    assert [hdfs.blocks(f"/durable/synced/{key}") for key in keys] == [1, 1]


async def test_a_copy_with_too_few_replicas_fails_and_names_the_setting(hdfs: HdfsCluster, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    settings = hdfs.settings("/durable/alone") | {"min.replicas": "2", "replication": "2", "web.url": hdfs.web_url}
    async with opened("hdfs", settings | {"timeout.ms": "8000"}) as storage:
        named = r"1 of 2 replicas.*`replication`, or lower `min.replicas`"
        with pytest.raises(RetriableRemoteStorageError, match=named):
            await storage.copy_log_segment_data(metadata, data)
        with pytest.raises(RetriableRemoteStorageError, match=named):
            await check_by_an_object(storage)
        with pytest.raises(RemoteResourceNotFoundError):
            await storage.fetch_indexes(metadata)


async def test_a_copy_counts_when_two_data_nodes_have_it(hdfs: HdfsCluster, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    settings = hdfs.settings("/durable/two") | {"min.replicas": "2", "replication": "2"}
    with hdfs.second_data_node():
        standby = "http://127.0.0.1:1"  # nothing listens there
        async with opened("hdfs", settings | {"web.url": f"{standby}, {hdfs.web_url}"}) as storage:
            await check_by_an_object(storage)
            await storage.copy_log_segment_data(metadata, data)
            assert await storage.fetch_indexes(metadata) == data.indexes
        async with opened("hdfs", settings | {"web.url": standby, "timeout.ms": "2000"}) as storage:
            with pytest.raises(RetriableRemoteStorageError, match=r"cannot be counted.*change `web.url`"):
                await storage.put_object("manifest", b"{}")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"replication": "1"}, "below `min.replicas`"),
        ({"kerberos.principal": "tidegate@REALM"}, "Kerberos.*dfs.namenode.replication.min"),
        ({"url": "hdfs://nameservice"}, "'web.url'"),
    ],
)
def test_settings_that_cannot_count_replicas_are_named(settings: dict[str, str], named: str) -> None:
    whole = {"url": "hdfs://name-node:8020", "path": "/tier", "cluster.id": "c"} | settings
    with pytest.raises(ValueError, match=named):
        hdfs_store.HdfsRemoteStorageManager(whole)
