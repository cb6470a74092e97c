"""The custom metadata of a store, and the limit of its size (KIP-917)."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.attempts import batches
from tests.support.tiers.workbench import Workbench
from tiers.config.tier_config import ConfigError
from tiers.errors import CustomMetadataTooLargeError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata

UPSTREAM = '[upstream]\nbootstrap.servers = "a:9092"\n'


def let_the_store_return(custom_metadata: bytes, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = bench.store.copy_log_segment_data

    async def copy_and_return(*args: object) -> bytes:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return custom_metadata

    monkeypatch.setattr(bench.store, "copy_log_segment_data", copy_and_return)


async def test_custom_metadata_above_the_limit_ends_the_copy(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 40))
    with monkeypatch.context() as patched:
        let_the_store_return(b"x" * 129, bench, patched)
        with pytest.raises(CustomMetadataTooLargeError):
            await bench.copy()
    assert bench.segments == []
    assert await bench.objects() == []
    remote_log = bench.services.settings.remote_log.model_copy(update={"custom_metadata_max_bytes": 129})
    bench.services = replace(bench.services, settings=replace(bench.services.settings, remote_log=remote_log))
    bench.restart()
    with monkeypatch.context() as patched:
        let_the_store_return(b"x" * 129, bench, patched)
        await bench.copy()
    assert bench.finished == [(0, 29)]
    assert bench.segments[0].custom_metadata == b"x" * 129


async def test_too_long_custom_metadata_goes_to_the_store_alone_for_deletion(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need it to find the objects (KIP-917)."""
    told = []

    async def deaf(segment: RemoteLogSegmentMetadata) -> bool:
        told.append(segment.custom_metadata)
        raise RetriableRemoteStorageError("slow down")

    bench.log.append(*batches(0, 40))
    let_the_store_return(b"x" * 129, bench, monkeypatch)
    monkeypatch.setattr(bench.store, "delete_log_segment_data", deaf)
    with pytest.raises(CustomMetadataTooLargeError):
        await bench.copy()
    assert told == [b"x" * 129]
    assert [(one.state.name, one.custom_metadata) for one in bench.segments] == [("DELETE_SEGMENT_STARTED", None)]


@pytest.mark.parametrize(("value", "is_valid"), [(-1, False), (0, True), (2**31 - 1, True), (2**31, False)])
def test_the_limit_has_the_range_of_kafkas_key(value: int, is_valid: bool) -> None:
    text = f"remote.log.metadata.custom.metadata.max.bytes = {value}\n{UPSTREAM}"
    with contextlib.nullcontext() if is_valid else pytest.raises(ConfigError, match=r"custom\.metadata\.max\.bytes"):
        assert parse_config(text).remote_log.custom_metadata_max_bytes == value


@pytest.mark.parametrize(
    ("limit_bytes", "weight", "is_valid"), [(13, 1, True), (12, 1, False), (12, 0, True), (0, 1, False)]
)
def test_a_location_whose_name_does_not_fit_is_refused(limit_bytes: int, weight: int, is_valid: bool) -> None:
    text = f"""
        remote.log.metadata.custom.metadata.max.bytes = {limit_bytes}
        {UPSTREAM}
        [storage]
        implementation = "local"
        path = "/tier"
        [[storage.locations]]
        name = "archive"
        path = "/archive"
        weight = {weight}
    """
    message = (
        r"custom\.metadata\.max\.bytes is \d+, but the location 'archive' takes 13 bytes .*: set it to at least 13"
    )
    with contextlib.nullcontext() if is_valid else pytest.raises(ConfigError, match=message):
        assert parse_config(text).storage is not None
