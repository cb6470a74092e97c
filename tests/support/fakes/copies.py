"""Segments to copy, further attempts at them, and stores that are open."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData, RemoteStorageManager

Copied = tuple[RemoteLogSegmentMetadata, LogSegmentData]
Store = TypeVar("Store", bound=RemoteStorageManager)


def segment_to_copy(folder: Path, value_bytes: int = 10, batches: int = 1) -> Copied:
    """Returns a segment with one record in each batch."""
    records = [batch_of(offset, 1, value_bytes=value_bytes) for offset in range(batches)]
    built = build_segment(folder / f"{uuid.uuid4()}.spool", records)
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


def other_attempt(metadata: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    return replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))


@asynccontextmanager
async def opened(store: Store) -> AsyncIterator[Store]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()
