"""A race of writers shows what a sequence of requests does not: some servers honour a condition only in sequence."""

from __future__ import annotations

import re

import pytest

from tests.support.fakes.copies import opened
from tests.support.servers.racing_s3 import RacingS3
from tiers.storage.remote_storage_manager import StoreFeatures
from tiers.storage.s3.storage import S3RemoteStorageManager


def store_of(server: RacingS3) -> S3RemoteStorageManager:
    return S3RemoteStorageManager(server.settings() | {"cluster.id": "c"})


async def features_of(server: RacingS3) -> StoreFeatures:
    async with server, opened(store_of(server)) as storage:
        (found,) = await storage.probe()
        assert (server.objects, server.uploads) == ({}, {})
        assert server.expecting == 0  # a body does not wait for the server's word
        return found


async def test_a_server_that_checks_and_writes_in_one_step_is_proved() -> None:
    found = await features_of(RacingS3(races=()))
    assert found.has_atomic_creation
    assert found.evidence.count("one of 12 concurrent writers won, in each of 3 races") == 2


@pytest.mark.parametrize(
    ("races", "said"),
    [
        ("put", r"If-None-Match by PUT: \d+ of 12 concurrent writers won"),
        ("complete", r"If-None-Match by multipart upload: \d+ of 12 concurrent writers won"),
    ],
)
async def test_a_server_that_lets_several_create_one_object_is_found_out(races: str, said: str) -> None:
    found = await features_of(RacingS3(races=(races,)))
    assert not found.has_atomic_creation
    assert re.search(said, found.evidence)
