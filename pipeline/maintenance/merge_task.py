"""`run_merge_task`: the executor's part of a merge: it joins the parts' logs into one segment, stores it and reads it
back.

The bytes go through a file on the executor. If there are keys, the bytes are decrypted before and encrypted after. The
parts stay unchanged. No reader sees the result before the driver commits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeline.config import PipelineConfig
from pipeline.maintenance.merge_plan import MergeGroup
from pipeline.source.remote_read import read_remote_range
from pipeline.spark.job import attempt
from pipeline.spark.scratch import scratch_folder
from pipeline.worker import worker
from protocol.errors import CorruptBatchError
from tiers.access.open_tier import open_key_ring
from tiers.errors import CorruptSegmentError, EncryptionKeyError, RemoteLogError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object
from tiers.segment.indexes_made_again import why_not_continued, with_merged_indexes
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.storage.retries import with_retries
from tiers.tasks.copy.segment_copy import write_objects
from tiers.tasks.copy.spool import Spool
from tiers.verify.read_back import read_back
from tiers.verify.segment_verification import DEFAULT_RUN_BYTES


@dataclass(frozen=True, slots=True)
class MergeTask:
    config: PipelineConfig = field(repr=False)
    cluster_id: str
    group: MergeGroup
    merged: RemoteLogSegmentMetadata
    facts: bytes = b""
    """The facts of the partition as of the announcement."""


@dataclass(frozen=True, slots=True)
class MergeTaskResult:
    """`error` is None if the merged segment is in the store. If `is_lost`, it must be tried again under another
    name."""

    custom_metadata: bytes | None = None
    error: str | None = None
    is_lost: bool = False


async def run_merge_task(task: MergeTask) -> MergeTaskResult:
    """Runs only the first attempt: an earlier executor may still write the objects of this name. For a later attempt
    the driver tries again under another name."""
    if attempt() > 0:
        return MergeTaskResult(error="its executor was lost", is_lost=True)
    storage = await worker().storage(task.config, task.cluster_id)
    max_custom_bytes = task.config.remote_log.custom_metadata_max_bytes
    with scratch_folder("merge") as folder:
        spool = Spool(folder, task.merged.segment_size_bytes * 3, 2)
        try:
            custom = await merge_segments(
                storage, open_key_ring(task.config), spool, task.group, task.merged, task.facts
            )
        except (RemoteLogError, CorruptBatchError, OSError) as error:
            return MergeTaskResult(error=str(error) or repr(error))
        finally:
            spool.close()
    if custom is not None and len(custom) > max_custom_bytes:
        what = f"the store returned {len(custom)} bytes of custom metadata; the limit is {max_custom_bytes}"
        return MergeTaskResult(custom, what)
    return MergeTaskResult(custom)


async def merge_segments(
    storage: RemoteStorageManager,
    key_ring: KeyRing,
    spool: Spool,
    group: MergeGroup,
    merged: RemoteLogSegmentMetadata,
    facts: bytes = b"",
) -> bytes | None:
    """Stores `merged`, reads it back and returns its custom metadata. Raises `RemoteLogError`, `CorruptBatchError`."""
    parts = [await _indexes(storage, part) for part in group.parts]
    _check(parts, key_ring)
    built = await _built(storage, key_ring, spool, group, merged, parts)
    custom_metadata = await write_objects(storage, spool, key_ring, built.with_facts(facts), merged)
    named = replace(merged, custom_metadata=custom_metadata)
    await read_back(storage, named, DEFAULT_RUN_BYTES, key_ring)
    return custom_metadata


async def _indexes(storage: RemoteStorageManager, part: RemoteLogSegmentMetadata) -> IndexesObject:
    return decode_indexes_object(await with_retries(lambda: storage.fetch_indexes(part)), part)


def _check(parts: Sequence[IndexesObject], key_ring: KeyRing) -> None:
    for earlier, later in pairwise(parts):
        trouble = why_not_continued(earlier, later)
        if trouble is not None:
            raise CorruptSegmentError(trouble)
    if key_ring.current is None and any(each.indexes.encryption is not None for each in parts):
        raise EncryptionKeyError("the segments are encrypted, and there is no key to encrypt the merged one with")


async def _built(
    storage: RemoteStorageManager,
    key_ring: KeyRing,
    spool: Spool,
    group: MergeGroup,
    merged: RemoteLogSegmentMetadata,
    parts: Sequence[IndexesObject],
) -> BuiltSegment:
    path = spool.new_path(group.partition)
    builder = SegmentBuilder(path, merged.start_offset, Carried(parts[0].epochs_before()))
    ring = key_ring if key_ring.keys else None
    try:
        for part in group.parts:
            async with aclosing(read_remote_range(storage, part, ring, part.start_offset, part.end_offset)) as runs:
                async for run in runs:
                    await asyncio.to_thread(builder.append, bytes(run.data), (), merged.segment_leader_epochs)
        built = with_merged_indexes(await spool.run(builder.finish), parts)
    except BaseException:
        builder.discard()
        raise
    described = merged.max_timestamp_ms, merged.segment_leader_epochs
    if described != (built.max_timestamp_ms, built.segment_leader_epochs):
        raise CorruptSegmentError(
            "the metadata of the segments disagrees with their logs on leader epochs or timestamp"
        )
    if merged.txn_index_empty and not built.txn_index_empty:
        raise CorruptSegmentError("the indexes of the segments have aborted transactions, their metadata has none")
    return built
