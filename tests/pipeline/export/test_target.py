"""The target of an export: files appear whole, once, and under their final names."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from shutil import rmtree

import pytest

from pipeline.config import parse_pipeline_config
from pipeline.export.target import TargetError, TargetSettings, open_target, target_settings
from pipeline.worker import worker
from tests.support.servers.hdfs import HdfsCluster
from tests.support.servers.racing_s3 import RacingS3
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import RetriableRemoteStorageError

MINIMAL = '[upstream]\nbootstrap.servers = "localhost:9092"\n'
BUCKET = "lake"

PLACES = ["in_folder", "in_s3", pytest.param("in_hdfs", marks=pytest.mark.full)]


@pytest.fixture
def in_folder(tmp_path: Path) -> TargetSettings:
    return target_settings(str(tmp_path / "my lake"), parse_pipeline_config(MINIMAL), {})


@pytest.fixture
def in_s3(s3: VersityGateway, topic_name: str) -> TargetSettings:
    """The target is reached like the store of the tier."""
    worker().run(s3.create_bucket(BUCKET))
    settings = {"implementation": "s3", **s3.settings(BUCKET), "part.size": str(5 << 20)}
    lines = [MINIMAL, "[storage]", *(f'{key} = "{value}"' for key, value in settings.items())]
    return target_settings(f"s3a://{BUCKET}/{topic_name}", parse_pipeline_config("\n".join(lines)), {})


@pytest.fixture
def in_hdfs(hdfs: HdfsCluster, topic_name: str) -> TargetSettings:
    return target_settings(
        f"{hdfs.url}/{topic_name}", parse_pipeline_config(MINIMAL), {"timeout.ms": "20000", "min.replicas": "1"}
    )


def test_the_name_of_a_published_file_is_durable(
    in_folder: TargetSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later plan counts on the files of an earlier one, also after a power cut."""
    synced: list[tuple[str, list[str]]] = []

    def sync(folder: Path) -> None:
        if ".tmp" not in folder.parts:
            visible = (each.name for each in folder.iterdir() if not each.name.startswith("."))
            synced.append((folder.name, sorted(visible)))

    monkeypatch.setattr("tiers.durable_folders.sync_folder", sync)
    monkeypatch.setattr("tiers.storage.local.sync_folder", sync)
    target, source = open_target(in_folder), tmp_path / "source"
    source.write_bytes(b"records")
    synced.clear()
    assert target.create("orders/0/1-2.parquet", source)
    assert synced[-3:] == [("my lake", ["orders"]), ("orders", ["0"]), ("0", ["1-2.parquet"])]
    synced.clear()
    staged = target.stage("orders/0/1-2.parquet", source)
    assert not target.publish(staged)
    assert not target.create("orders/0/1-2.parquet", source)
    assert synced == [("0", ["1-2.parquet"])] * 2


@pytest.mark.parametrize("place", PLACES)
def test_a_file_appears_whole_and_is_never_replaced(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    settings: TargetSettings = request.getfixturevalue(place)
    target = open_target(settings)
    target.require_atomic_creation()
    assert target.names("a/") == []
    with pytest.raises(FileNotFoundError):
        target.read("a/0/1-2.parquet")
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"small")
    large.write_bytes(bytes(range(256)) * (6 << 12))
    assert target.create("a/0/1-2.parquet", small)
    assert not target.create("a/0/1-2.parquet", large)
    assert target.read("a/0/1-2.parquet") == b"small"
    assert target.create("a/1/1-2.parquet", large)
    assert not target.create("a/1/1-2.parquet", small)
    assert target.read("a/1/1-2.parquet") == large.read_bytes()
    assert target.names("a/") == ["a/0/1-2.parquet", "a/1/1-2.parquet"]
    assert target.uri("a/0/1-2.parquet") == f"{settings.url.rstrip('/')}/a/0/1-2.parquet"

    # One of two concurrent writers succeeds.
    created: list[bool] = []
    both = [threading.Thread(target=lambda: created.append(target.create("c/0/1-2.parquet", large))) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert sorted(created) == [False, True]
    assert target.names("c/") == ["c/0/1-2.parquet"]


def test_a_full_folder_is_named_and_keeps_no_file(
    in_folder: TargetSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, target = tmp_path / "source", open_target(in_folder)
    source.write_bytes(b"whole")
    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(RetriableRemoteStorageError, match=f"^{tmp_path / 'my lake'}\\S*: No space left on device$"):
        target.create("a/0/1-2.parquet", source)
    assert (target.names("a/"), target.staged("a/")) == ([], [])


@pytest.mark.parametrize("place", PLACES)
def test_staged_files_are_invisible_and_published_once(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target = open_target(request.getfixturevalue(place))
    one, other, third = tmp_path / "one", tmp_path / "other", tmp_path / "third"
    one.write_bytes(b"one")
    other.write_bytes(b"other")
    third.write_bytes(bytes(range(256)) * (6 << 12))
    assert target.staged("a/") == []
    staged = [target.stage("a/0/1-2.parquet", one), target.stage("a/0/1-2.parquet", other)]
    large = target.stage("a/1/3-4.parquet", third)
    elsewhere = target.stage("b/0/1-2.parquet", one)
    assert target.names("a/") == []
    found = target.staged("a/")
    assert {(each.name, each.id) for each in found} == {(each.name, each.id) for each in (*staged, large)}
    assert target.publish(staged[1])
    assert not target.publish(staged[0])
    assert target.read("a/0/1-2.parquet") == b"other"
    assert target.publish(large)
    assert target.read("a/1/3-4.parquet") == third.read_bytes()
    assert target.staged("a/") == []
    [left] = target.staged("b/")
    target.discard(left)
    target.discard(elsewhere)
    assert not target.publish(elsewhere)
    assert target.staged("b/") == []
    assert target.names("b/") == []


def test_a_folder_that_was_deleted_is_created_again(in_folder: TargetSettings, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"records")
    open_target(in_folder).create("a", tmp_path / "source")
    rmtree(tmp_path / "my lake")
    assert open_target(in_folder).create("a", tmp_path / "source")


def test_a_target_is_named_by_its_url(tmp_path: Path) -> None:
    config = parse_pipeline_config(MINIMAL)
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="File exists"):
        open_target(TargetSettings((tmp_path / "file" / "lake").as_uri()))
    assert target_settings("/lake/orders", config, {}).url == "file:///lake/orders"
    with pytest.raises(TargetError, match="a folder has no settings: region"):
        target_settings("/lake", config, {"region": "x"})
    with pytest.raises(TargetError, match=r"expected a folder, s3://"):
        target_settings("gs://bucket/x", config, {})
    with pytest.raises(TargetError, match="unknown setting of s3: bucket"):
        target_settings("s3://bucket/x", config, {"bucket": "x"})
    secret = target_settings("s3://bucket/x", config, {"secret.access.key": "hush"})
    assert "hush" not in repr(secret)


def test_an_export_to_a_server_that_lets_several_writers_win_is_refused(topic_name: str) -> None:
    async def begin() -> RacingS3:
        return await RacingS3(races=("complete",)).__aenter__()

    server = worker().run(begin())
    try:
        settings = {key: value for key, value in server.settings().items() if key != "bucket"}
        target = open_target(target_settings(f"s3://bucket/{topic_name}", parse_pipeline_config(MINIMAL), settings))
        with pytest.raises(TargetError, match=r"of 12 concurrent writers won.*update the server.*or to HDFS"):
            target.require_atomic_creation()
    finally:
        worker().run(server.__aexit__(None, None, None))
