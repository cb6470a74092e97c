"""An empty state, a follower of a scripted cluster, and an owner, for the tests that take one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.tiers.following import Cluster, Following, opened
from tests.support.tiers.metadata_state import open_state
from tests.support.tiers.owning import Group, group_of_one
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic import follower as follower_module


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(follower_module, "fetch_raw", cluster.fetch)
    return cluster


@pytest.fixture
def following(cluster: Cluster, tmp_path: Path) -> Iterator[Following]:
    with opened(cluster, tmp_path) as following:
        yield following


@pytest.fixture
def state(tmp_path: Path) -> Iterator[RemoteLogMetadataStateWriter]:
    writer = open_state(tmp_path)
    yield writer
    writer.close()


@pytest.fixture
async def group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    async with group_of_one(monkeypatch) as group:
        yield group
