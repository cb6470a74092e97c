"""What a store wants to be kept with a segment, and what happens when it is too much (KIP-917)."""

from __future__ import annotations

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import Workbench
from tiers.errors import CustomMetadataTooLargeError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata


def batches(first: int, count: int, leader_epoch: int = 0) -> list[bytes]:
    """Batches of ten records and about 300 bytes: three fill a segment of the test policy."""
    return [batch_of(first + 10 * n, 10, value_bytes=15, leader_epoch=leader_epoch) for n in range(count)]


async def test_custom_metadata_above_the_limit_ends_the_copy_and_its_objects(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = bench.store.copy_log_segment_data

    async def talkative(*args: object) -> bytes:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return b"x" * 129

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "copy_log_segment_data", talkative)
    with pytest.raises(CustomMetadataTooLargeError):
        await bench.copy()
    assert bench.segments == []
    assert await bench.objects() == []


async def test_the_store_alone_is_told_what_is_too_long_to_be_recorded_and_its_failure_changes_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need it to find the objects (KIP-917)."""
    copy, told = bench.store.copy_log_segment_data, []

    async def talkative(*args: object) -> bytes:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return b"x" * 129

    async def deaf(segment: RemoteLogSegmentMetadata) -> bool:
        told.append(segment.custom_metadata)
        raise RetriableRemoteStorageError("slow down")

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "copy_log_segment_data", talkative)
    monkeypatch.setattr(bench.store, "delete_log_segment_data", deaf)
    with pytest.raises(CustomMetadataTooLargeError):
        await bench.copy()
    assert told == [b"x" * 129]
    assert [(one.state.name, one.custom_metadata) for one in bench.segments] == [("DELETE_SEGMENT_STARTED", None)]


async def test_custom_metadata_is_kept_with_the_finished_segment(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = bench.store.copy_log_segment_data

    async def talkative(*args: object) -> bytes:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return b"etag"

    bench.log.append(*batches(0, 4))
    monkeypatch.setattr(bench.store, "copy_log_segment_data", talkative)
    await bench.copy()
    assert bench.segments[0].custom_metadata == b"etag"
