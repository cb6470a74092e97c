"""Every store behind a server that fails: each call ends with an error that says to try again, nothing is left behind,
and all works again when the server does."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.breaking_relay import BreakingRelay, Fault
from tests.support.servers.hdfs import HdfsCluster
from tests.support.servers.stores import opened, settings_of
from tests.support.tiers.waiting import until
from tiers.errors import RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.child_calls import ChildCalls
from tiers.storage.hdfs import HdfsRemoteStorageManager
from tiers.storage.remote_storage_manager import LogSegmentData, RemoteStorageManager

Calls = dict[str, Callable[[], Awaitable[object]]]
DEADLINE_MS = 700


def calls_of(storage: RemoteStorageManager, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> Calls:
    other = replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))

    async def listed() -> list[str]:
        return [stored.key async for stored in storage.list_objects("")]

    return {
        "copy": lambda: storage.copy_log_segment_data(metadata, data),
        "read": lambda: storage.fetch_log_segment(metadata, 0, 999),
        "indexes": lambda: storage.fetch_indexes(metadata),
        # Another attempt may have sent them: a library may retry after its caller has stopped waiting.
        "delete": lambda: storage.delete_log_segment_data(other),
        "put": lambda: storage.put_object("manifest.json", b"{}"),
        "get": lambda: storage.get_object("manifest.json"),
        "list": listed,
    }


async def within(at_once: asyncio.Semaphore, call: Callable[[], Awaitable[object]]) -> object:
    """The result or the error of the call."""
    async with at_once:
        try:
            return await call()
        except Exception as error:
            return error


async def until_it_works(call: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await call()
        except RetriableRemoteStorageError:
            continue
        return


@pytest.mark.full
@pytest.mark.parametrize("store", ["s3", "azure", "gcs", "hdfs"])
async def test_every_call_ends_and_works_again(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    settings = await settings_of(store, request, tmp_path)
    settings |= {"timeout.ms": str(DEADLINE_MS)}
    built = build_segment(tmp_path / "log", [batch_of(0, 5, value_bytes=5000)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    threads_before = threading.active_count()
    port = int((settings["url"] if store == "hdfs" else settings["endpoint.url"]).rpartition(":")[2])
    async with BreakingRelay(port) as relay:
        relayed = {"url": f"hdfs://127.0.0.1:{relay.port}"} if store == "hdfs" else {"endpoint.url": relay.url}
        async with opened(store, settings | relayed) as storage:
            calls = calls_of(storage, metadata, data)
            for name in ("copy", "put"):
                await until_it_works(calls[name])
            for fault in Fault:
                relay.break_with(fault)
                # The half of what arrives together may hold a whole answer, where calls share a connection.
                at_once = asyncio.Semaphore(1 if store == "hdfs" and fault is Fault.TRUNCATES else len(calls))
                outcomes = await asyncio.gather(*(within(at_once, call) for call in calls.values()))
                failed = dict(zip(calls, outcomes, strict=True))
                if store == "gcs" and fault is Fault.TRUNCATES and failed["delete"] is True:
                    del failed["delete"]  # its client takes the first half of an answer: nothing is there any more
                others = {
                    name: outcome
                    for name, outcome in failed.items()
                    if not isinstance(outcome, RetriableRemoteStorageError)
                }
                assert others == {}, fault
                relay.heal()
                for name in calls:
                    await until_it_works(calls[name])
        assert threading.active_count() <= threads_before + 5 * 16
        await until(lambda: relay.connections == 0)
    assert data.log_segment.is_file()


async def test_a_connection_that_went_silent_for_good_is_given_up(
    hdfs: HdfsCluster, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A connection that a firewall forgot. The HDFS library has one to the NameNode, and waits for it without end."""
    settings = await settings_of("hdfs", request, tmp_path)
    async with BreakingRelay(hdfs.name_node_port) as relay:
        settings |= {"url": f"hdfs://127.0.0.1:{relay.port}", "timeout.ms": "2000"}
        async with opened("hdfs", settings) as storage:
            assert isinstance(storage, HdfsRemoteStorageManager)
            assert isinstance(storage.calls, ChildCalls)
            children = storage.calls
            await until_it_works(lambda: storage.put_object("manifest.json", b"{}"))
            relay.silence_open()
            with pytest.raises(RetriableRemoteStorageError, match="no progress"):
                await storage.get_object("manifest.json")
            await until_it_works(lambda: storage.get_object("manifest.json"))
            await until(lambda: len(children.processes) == 1 and relay.connections == 1)


async def test_a_data_node_that_dies_and_comes_back(
    hdfs: HdfsCluster, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A write to it would fail only after half a minute: our own deadline ends it."""
    built = build_segment(tmp_path / "log", [batch_of(0, 5)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    settings = await settings_of("hdfs", request, tmp_path)
    async with opened("hdfs", settings | {"timeout.ms": "2000"}) as storage:
        calls = calls_of(storage, metadata, data)
        await until_it_works(calls["copy"])
        hdfs.kill_data_node()
        try:
            for name in ("read", "indexes", "put"):
                with pytest.raises(RetriableRemoteStorageError):
                    await calls[name]()
        finally:
            hdfs.start_data_node()
            hdfs.wait()
        for name in ("read", "indexes", "put", "get"):
            await until_it_works(calls[name])
