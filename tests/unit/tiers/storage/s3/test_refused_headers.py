"""Servers with the S3 protocol that refuse a header of AWS, demand one, or honour a condition only in sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.copies import Copied, opened, segment_to_copy
from tests.support.servers.racing_s3 import RacingS3
from tiers.errors import RemoteStorageError
from tiers.storage.object_key import indexes_key, log_key
from tiers.storage.remote_storage_manager import check_by_an_object
from tiers.storage.s3.storage import S3RemoteStorageManager

PART_BYTES = 5 << 20


def store_of(server: RacingS3) -> S3RemoteStorageManager:
    return S3RemoteStorageManager(server.settings() | {"cluster.id": "c", "part.size": str(PART_BYTES)})


@pytest.fixture(params=[1_000, PART_BYTES], ids=["one PUT", "parts"])
def segment(request: pytest.FixtureRequest, tmp_path: Path) -> Copied:
    return segment_to_copy(tmp_path, request.param)


@pytest.mark.parametrize(
    "refuses",
    [
        {"If-None-Match": 501},
        {"If-None-Match": 501, "x-amz-checksum-crc32c": 400, "x-amz-checksum-algorithm": 400},
    ],
    ids=["condition", "condition and checksum"],
)
async def test_a_copy_needs_no_header_of_aws(refuses: dict[str, int], segment: Copied) -> None:
    metadata, data = segment
    server = RacingS3(races=(), refuses=refuses)
    async with server, opened(store_of(server)) as storage:
        await check_by_an_object(storage)
        for _ in range(2):  # the second copy finds the objects of the first one
            await storage.copy_log_segment_data(metadata, data)
            assert server.objects == {
                log_key("c", metadata): data.log_segment.read_bytes(),
                indexes_key("c", metadata): data.indexes,
            }
        with pytest.raises(RemoteStorageError, match="a uuid was used twice"):
            await storage.copy_log_segment_data(metadata, replace(data, indexes=b"others"))
        fault = await storage.race_fault()
        assert bool(fault) == ("If-None-Match" in refuses)
        assert ("the store refuses the condition" in fault) == ("If-None-Match" in refuses)


@pytest.mark.parametrize("refuses", [{}, {"If-None-Match": 501}], ids=["as AWS", "without conditions"])
async def test_a_bucket_with_object_lock_gets_the_checksum_of_each_body(
    refuses: dict[str, int], segment: Copied
) -> None:
    server = RacingS3(races=(), refuses=refuses, is_locked=True)
    async with server, opened(store_of(server)) as storage:
        await check_by_an_object(storage)
        await storage.copy_log_segment_data(*segment)
        assert bool(await storage.race_fault()) == bool(refuses)


async def fault_of(server: RacingS3) -> str:
    async with server, opened(store_of(server)) as storage:
        fault = await storage.race_fault()
        assert (server.objects, server.uploads) == ({}, {})
        assert server.expecting == 0  # a body does not wait for the server's word
        return fault


async def test_a_server_that_checks_and_writes_in_one_step_is_proved() -> None:
    assert await fault_of(RacingS3(races=())) == ""


@pytest.mark.parametrize(
    ("races", "said"),
    [
        ("put", r"If-None-Match by PUT: \d+ of 12 concurrent writers won"),
        ("complete", r"If-None-Match by multipart upload: \d+ of 12 concurrent writers won"),
    ],
)
async def test_a_server_that_lets_several_create_one_object_is_found_out(races: str, said: str) -> None:
    assert re.search(said, await fault_of(RacingS3(races=(races,))))
