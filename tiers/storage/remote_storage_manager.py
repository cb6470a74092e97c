"""`RemoteStorageManager` (KIP-405, KIP-917): the life of a segment's objects in a store. Third parties may add one.

Rules that every implementation keeps, and the contract test checks:

* A segment has two objects, `<key>.log` and `<key>.indexes`; the second is written last. Nothing else is written.
* The key holds the segment's uuid, new for every attempt, so no copy ever overwrites another's objects.
* Ranges are positions in the stored `.log` object; both ends are inclusive; an end past the object is clamped.
* A missing object is `RemoteResourceNotFoundError`, a refusal for good (credentials, bucket) `RemoteStorageError`, all
  else that may heal `RetriableRemoteStorageError`. No other exception leaves an implementation.
* Not promised: a listing right after a write. Nothing on the copy, read or delete path lists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from tiers.model.segment_metadata import RemoteLogSegmentMetadata


@dataclass(frozen=True, slots=True)
class LogSegmentData:
    """What `copy_log_segment_data` stores: a file of concatenated record batches, and the `.indexes` object's bytes."""

    log_segment: Path
    indexes: bytes


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing; `key` is relative to the store's prefix. `custom_metadata` is what a segment's metadata
    must have for this object to be found, where the store needs any; `modified_ms` when it was written, where the store
    tells."""

    key: str
    size_bytes: int
    custom_metadata: bytes | None = None
    modified_ms: int | None = field(default=None, compare=False)


class RemoteStorageManager(Protocol):
    """Constructed with its settings, found by entry point `tidegate.remote_storage_manager`."""

    async def open(self) -> None:
        """Connects; called once, on the loop that will use it."""

    async def check(self) -> None:
        """Proves that objects can be written, read and deleted; raises an error that names what to change."""

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        """Stores both objects durably, `.log` first. Idempotent per uuid: a second call with the same data succeeds.

        Returns custom metadata (KIP-917) to be kept with the segment, or None.
        """

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview:
        """The stored bytes `[start_position, end_position]` of `.log`; the buffer is the caller's alone, and may be
        read-only: no later call changes it.

        `start_position` at or past the end gives an empty view; `end_position` is clamped to the object.
        """

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        """The whole `.indexes` object."""

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        """Removes both objects, `.indexes` first, and multipart leftovers of this uuid. True when nothing is left,
        also when nothing was there; False when the store did not confirm it."""

    async def put_object(self, key: str, data: bytes) -> None:
        """Writes or replaces a small object (partition manifests)."""

    async def get_object(self, key: str) -> bytes:
        """Reads a small object."""

    async def delete_object(self, key: str) -> None:
        """Removes a small object; one that is missing is no error."""

    def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Every object under `prefix`; costs money: for `rebuild` and `orphans` alone."""

    async def close(self) -> None:
        """Releases connections; safe to call twice."""


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """What a writer that died, or a request that was repeated, left in a store that keeps the parts of an object until
    it has them all. `key` is relative to the store's prefix; `location` is which of several stores has it."""

    key: str
    id: str
    started_ms: int | None
    location: str = ""


@runtime_checkable
class UnfinishedUploads(Protocol):
    """What a storage manager offers besides, where its store keeps such things beside the objects."""

    def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        """All of them, those under way too; costs money: for `orphans` alone."""

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """One that is gone is no error."""


class RemoteStorageManagerFactory(Protocol):
    def __call__(self, settings: Mapping[str, str]) -> RemoteStorageManager: ...
