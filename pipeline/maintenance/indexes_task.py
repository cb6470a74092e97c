"""`make_indexes`: the executor's part of `rebuild --indexes-only`. It checks each segment's `.indexes` object and, if
that is missing or damaged, rebuilds it from the `.log` object, writes it and reads it back.

An encrypted segment cannot be read without its `.indexes` object, which held the wrapped key. The result then says so.
An object of a later format is not damaged: a later release wrote it, and reads more from it than this one could write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pipeline.config import PipelineConfig
from pipeline.spark.scratch import scratch_folder
from pipeline.worker import worker
from protocol.errors import CorruptBatchError
from protocol.records.record_batch import verify_batches
from tiers.errors import CorruptSegmentError, LaterFormatError, RemoteLogError, RemoteResourceNotFoundError
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object, encode_indexes_object
from tiers.segment.indexes_made_again import LogIndexer
from tiers.segment.segment_builder import Carried
from tiers.storage.locations import LocatedRemoteStorageManager, decode_location
from tiers.storage.object_key import indexes_key
from tiers.storage.retries import with_retries

GET_BYTES = 8 << 20


class Verdict(StrEnum):
    WHOLE = "whole"
    LOST = "to be rebuilt"
    WRITTEN = "rebuilt"
    REFUSED = "cannot be rebuilt"


@dataclass(frozen=True, slots=True)
class IndexesTask:
    """`segments` follow each other in one partition. `before` and `after` are their neighbours, or None."""

    config: PipelineConfig = field(repr=False)
    cluster_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    before: RemoteLogSegmentMetadata | None
    after: RemoteLogSegmentMetadata | None
    is_applied: bool


@dataclass(frozen=True, slots=True)
class IndexesResult:
    """The result of one segment."""

    segment: RemoteLogSegmentMetadata
    verdict: Verdict
    what: str = ""


async def make_indexes(task: IndexesTask) -> list[IndexesResult]:
    """Returns the results in order. A rebuilt `.indexes` object tells how the next segment begins."""
    storage = await worker().storage(task.config, task.cluster_id)
    around = [task.before, *task.segments, task.after]
    found: list[IndexesResult] = []
    for number, segment in enumerate(task.segments, 1):
        try:
            result = await make_one(
                storage, task.cluster_id, segment, around[number - 1], around[number + 1], is_applied=task.is_applied
            )
        except (RemoteLogError, CorruptBatchError, OSError) as error:
            result = IndexesResult(segment, Verdict.REFUSED, str(error) or repr(error))
        found.append(result)
    return found


async def make_one(
    storage: LocatedRemoteStorageManager,
    cluster_id: str,
    segment: RemoteLogSegmentMetadata,
    before: RemoteLogSegmentMetadata | None,
    after: RemoteLogSegmentMetadata | None,
    *,
    is_applied: bool,
    get_bytes: int = GET_BYTES,
) -> IndexesResult:
    """Checks and rebuilds one segment's indexes. Raises `RemoteLogError`, `CorruptBatchError` if that is impossible."""
    trouble = await _stored(storage, segment)
    if isinstance(trouble, IndexesObject):
        return IndexesResult(segment, Verdict.WHOLE)
    earlier, later = await _neighbour(storage, before), await _neighbour(storage, after)
    with scratch_folder("indexes") as folder:
        carried = Carried(_epochs_of(before, segment)) if earlier is None else Carried.behind(earlier.indexes)
        indexer = LogIndexer(folder / "log", segment, carried, later)
        try:
            async for batches in _log(storage, segment, get_bytes):
                await asyncio.to_thread(indexer.append, batches)
            built = await asyncio.to_thread(indexer.finish)
        finally:
            indexer.discard()
    guessed = "" if earlier is not None or not segment.start_offset else "; the state before it is not known"
    if not is_applied:
        return IndexesResult(segment, Verdict.LOST, trouble + guessed)
    described = replace(
        segment,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        custom_metadata=None,
        txn_index_empty=built.txn_index_empty,
    )
    _, inner = decode_location(segment.custom_metadata)
    key = indexes_key(cluster_id, replace(segment, custom_metadata=inner))
    facts = next((each.indexes.facts for each in (later, earlier) if each is not None), b"")
    data = encode_indexes_object(described, replace(built.indexes, facts=facts))
    await with_retries(lambda: storage.place_of(segment).put_object(key, data))
    if bytes(await with_retries(lambda: storage.fetch_indexes(segment))) != data:
        raise CorruptSegmentError("the store does not return the .indexes object that was written")
    return IndexesResult(segment, Verdict.WRITTEN, trouble + guessed)


async def _stored(storage: LocatedRemoteStorageManager, segment: RemoteLogSegmentMetadata) -> IndexesObject | str:
    """Returns the decoded `.indexes` object, or a sentence that says what is wrong with it. It does not wait for a
    missing object to appear: the rebuilt object would have the same bytes. Raises `LaterFormatError`."""

    async def fetch() -> bytes | None:
        try:
            return await storage.fetch_indexes(segment)
        except RemoteResourceNotFoundError:
            return None

    data = await with_retries(fetch)
    if data is None:
        return "the .indexes object is missing"
    try:
        return decode_indexes_object(data, segment)
    except LaterFormatError:
        raise
    except CorruptSegmentError as error:
        return f"the .indexes object: {error}"


async def _neighbour(
    storage: LocatedRemoteStorageManager, segment: RemoteLogSegmentMetadata | None
) -> IndexesObject | None:
    try:
        stored = None if segment is None else await _stored(storage, segment)
    except LaterFormatError:
        return None
    return stored if isinstance(stored, IndexesObject) else None


def _epochs_of(
    before: RemoteLogSegmentMetadata | None, segment: RemoteLogSegmentMetadata
) -> tuple[LeaderEpochEntry, ...]:
    """Returns all that the metadata knows of the leader epochs before `segment`."""
    return () if before is None else before.segment_leader_epochs


async def _log(
    storage: LocatedRemoteStorageManager, segment: RemoteLogSegmentMetadata, get_bytes: int
) -> AsyncGenerator[bytes]:
    """Yields whole batches that match their CRCs. Raises `CorruptSegmentError` if the object is not a log."""
    position, rest = 0, b""
    while True:
        view = await with_retries(_range(storage, segment, position, get_bytes))
        position += len(view)
        if not view:
            break
        if position > segment.segment_size_bytes:
            raise CorruptSegmentError(
                "the .log object is larger than the log: it is encrypted, and the key was in the .indexes object"
            )
        data = rest + bytes(view)
        try:
            batches = verify_batches(data)
        except CorruptBatchError as error:
            raise CorruptSegmentError(f"the .log object is not a log, or it is encrypted: {error}") from error
        whole = batches[-1].end if batches else 0
        rest = data[whole:]
        if whole:
            yield data[:whole]
    if rest:
        raise CorruptSegmentError(f"the .log object ends with {len(rest)} bytes that are not a whole record batch")


def _range(
    storage: LocatedRemoteStorageManager, segment: RemoteLogSegmentMetadata, position: int, size_bytes: int
) -> Callable[[], Awaitable[memoryview]]:
    return lambda: storage.fetch_log_segment(segment, position, position + size_bytes - 1)
