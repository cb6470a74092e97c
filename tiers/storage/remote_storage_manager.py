"""`RemoteStorageManager` stores, reads and deletes the objects of segments (KIP-405, KIP-917).

Third parties may add an implementation. Every implementation follows these rules, and the contract test checks them:

* A segment has two objects, `<key>.log` and `<key>.indexes`. The implementation writes `<key>.indexes` last, and writes
  no other object.
* The key includes the segment's uuid, which is new for every attempt, so no copy overwrites another's objects.
* Ranges are positions in the stored `.log` object, with both ends inclusive. An end beyond the object is clamped. A
  range without an end goes to the end of the object.
* A missing object raises `RemoteResourceNotFoundError`. A permanent refusal (credentials, bucket) raises
  `RemoteStorageError`. A transient error raises `RetriableRemoteStorageError`. An implementation raises no others.
* A listing need not show an object right after its write. The copy, read and delete paths never list.
* `put_object` replaces whatever is there.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from tiers.errors import RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata


@dataclass(frozen=True, slots=True)
class LogSegmentData:
    """The data of a segment to copy: a file of concatenated record batches, and the bytes of the `.indexes` object."""

    log_segment: Path
    indexes: bytes


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a listing. `key` is relative to the store's prefix.

    `custom_metadata` is the custom metadata by which the store finds the object, if the store needs any. `modified_ms`
    is the time of the last write, if the store reports it."""

    key: str
    size_bytes: int
    custom_metadata: bytes | None = None
    modified_ms: int | None = field(default=None, compare=False)


def check_range(start_position: int, end_position: int | None) -> None:
    """Raises `ValueError` when the start is negative or the inclusive end lies before the start."""
    if start_position < 0 or (end_position is not None and end_position < start_position):
        raise ValueError(f"the range from {start_position} to {end_position} is not a range of positions")


class SegmentReads(Protocol):
    """The methods that read a segment."""

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        """Returns the stored bytes `[start_position, end_position]` of `.log`; None reads to the end of the object.

        The caller owns the buffer, which may be read-only; no later call changes it. If `start_position` is at or
        beyond the end of the object, the view is empty. `end_position` is clamped to the object. Raises `ValueError`
        when the range is not a range (`check_range`).
        """

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        """Returns the whole `.indexes` object."""


class RemoteStorageManager(SegmentReads, Protocol):
    """A store. A factory makes it from its settings; entry points `tidegate.remote_storage_manager` name factories."""

    async def open(self) -> None:
        """Connects. The caller calls it once, on the event loop that it will use."""

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        """Stores both objects durably, `.log` first. Idempotent per uuid: a second call with the same data succeeds.

        Returns custom metadata (KIP-917) to keep with the segment, or None.
        """

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        """Removes both objects, `.indexes` first, and the multipart uploads of this uuid.

        Returns True when nothing is left, also when there was nothing; False when the store did not confirm it."""

    async def put_object(self, key: str, data: bytes) -> None:
        """Writes or replaces a small object (the marker of the tier, facts)."""

    async def get_object(self, key: str) -> bytes:
        """Reads a small object."""

    async def delete_object(self, key: str) -> None:
        """Removes a small object. A missing object is no error."""

    def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields every object under `prefix`. Listing costs money, so no request of a client may cause it."""

    async def close(self) -> None:
        """Releases the connections. Safe to call twice."""


async def check_by_an_object(storage: RemoteStorageManager) -> None:
    """Writes, reads and deletes an object. Raises an error, which names the setting to change."""
    key = f".check-{uuid.uuid4()}"
    await storage.put_object(key, key.encode())
    found = await storage.get_object(key)
    await storage.delete_object(key)
    if found != key.encode():
        raise RemoteStorageError("an object reads back with other bytes than were written")


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An unfinished multipart upload. A writer that died or a repeated request may leave one.

    `key` is relative to the store's prefix. `location` names the store, if there are several."""

    key: str
    id: str
    started_ms: int | None
    location: str = ""


@runtime_checkable
class UnfinishedUploads(Protocol):
    """The additional methods of a storage manager whose store keeps unfinished multipart uploads."""

    def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        """Yields all uploads, including those in progress. Listing costs money, so only `orphans` may call it."""

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Aborts an upload. A missing upload is no error."""


Allocate = Callable[[int], memoryview]
"""Returns writable memory of so many bytes, whose content is undefined."""


@runtime_checkable
class ReadsIntoMemory(Protocol):
    """The additional method of a storage manager that receives a range of a segment straight into given memory."""

    def use_memory(self, allocate: Allocate) -> None:
        """Lets the later calls of `fetch_log_segment` return memory that `allocate` gave. Other stores ignore it."""


RemoteStorageManagerFactory = Callable[[Mapping[str, str]], RemoteStorageManager]
