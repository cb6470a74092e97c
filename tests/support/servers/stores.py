"""The stores of the contract by name: a place that belongs to one test, and an open manager of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.servers.hdfs import HdfsCluster
from tests.support.servers.object_stores import Azurite, FakeGcs
from tests.support.servers.versitygw import VersityGateway
from tiers.config.managers import create_remote_storage_manager
from tiers.storage.remote_storage_manager import RemoteStorageManager

CLUSTER_ID = "cluster-1"
PART_BYTES = 5 << 20


@asynccontextmanager
async def opened(store: str, settings: Mapping[str, str]) -> AsyncIterator[RemoteStorageManager]:
    implementation = "arrow" if store in ("gcs", "azure") else store
    manager = create_remote_storage_manager(implementation, {**settings, "cluster.id": CLUSTER_ID})
    try:
        await manager.open()
        yield manager
    finally:
        await manager.close()


async def settings_of(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """A place of this test's own in a real store."""
    prefix = f"tiered/{uuid.uuid4()}"
    folder = tmp_path / "store"
    match store:
        case "s3":
            s3: VersityGateway = request.getfixturevalue("s3")
            await s3.create_bucket("contract")
            return s3.settings("contract") | {"prefix": prefix, "part.size": str(PART_BYTES)}
        case "hdfs":
            cluster: HdfsCluster = request.getfixturevalue("hdfs")
            return cluster.settings(f"/{prefix}")
        case "gcs":
            gcs: FakeGcs = request.getfixturevalue("gcs")
            gcs.create_bucket("contract")
            return gcs.settings("contract", prefix)
        case "azure":
            azure: Azurite = request.getfixturevalue("azure")
            azure.create_container("contract")
            return azure.settings("contract", prefix)
        case "arrow":
            folder.mkdir()
            return {"uri": folder.as_uri()}
    folder.mkdir()
    return {"path": str(folder)}
