"""`LocatedRemoteStorageManager`: several buckets, prefixes or whole stores, and for every segment the choice of one.

    custom metadata (KIP-917) = "TGL" | 1 | flags | length of the name | name | the store's own custom metadata

* The choice is recorded with the segment. Reads and deletes go by the record alone, so what is current can be changed
  at any time; a location that is recorded and not configured any more is an error that names it.
* *Home* is the store of `[storage]` itself. It holds what no location was chosen for, all segments from before there
  were locations, and the small objects.
* A copy that did not end has no record. What such a copy left is deleted in every place where it may lie.
* The choice is a function of the segment's uuid: a copy that is repeated goes to the same place.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tiers.errors import (
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    SomeStoresInTroubleError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import parse_segment_key
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    RemoteStorageManager,
    StoredObject,
    UnfinishedUpload,
    UnfinishedUploads,
)

HOME = ""
_MAGIC = b"TGL\x01"
_HAS_INNER = 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """`weight` is its share of new segments of the topics that `topics`, a shell pattern, matches; 0 takes none."""

    name: str
    storage: RemoteStorageManager
    weight: int = 1
    topics: str = "*"


def check_location_name(name: str) -> str:
    """Raises `ValueError`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"location {name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
    return name


def encode_location(name: str, inner: bytes | None) -> bytes:
    encoded = name.encode()
    return _MAGIC + bytes((0 if inner is None else _HAS_INNER, len(encoded))) + encoded + (inner or b"")


def decode_location(custom_metadata: bytes | None) -> tuple[str, bytes | None]:
    """The location's name and the store's own custom metadata; home for what names no location."""
    if custom_metadata is None or not custom_metadata.startswith(_MAGIC):
        return HOME, custom_metadata
    start = len(_MAGIC) + 2
    if len(custom_metadata) < start or len(custom_metadata) < start + custom_metadata[start - 1]:
        raise RemoteStorageError("the segment's custom metadata is cut off: it names no location")
    end = start + custom_metadata[start - 1]
    inner = custom_metadata[end:] if custom_metadata[start - 2] & _HAS_INNER else None
    return custom_metadata[start:end].decode(errors="replace"), inner


class LocatedRemoteStorageManager:
    """Without locations it adds nothing, but still refuses to look at home for what is recorded elsewhere."""

    def __init__(self, home: RemoteStorageManager, locations: Sequence[StorageLocation] = ()) -> None:
        """Raises `ValueError` for names that are wrong or used twice."""
        self._home = home
        self._locations = locations
        self._places: dict[str, RemoteStorageManager] = {HOME: home}
        for location in locations:
            if check_location_name(location.name) in self._places:
                raise ValueError(f"two locations are called {location.name!r}")
            self._places[location.name] = location.storage

    async def open(self) -> None:
        for name, place in self._different_places():
            try:
                await place.open()
            except RemoteStorageError as error:
                raise _named(name, error) from error

    async def check(self) -> None:
        for name, place in self._different_places():
            try:
                await place.check()
            except RemoteStorageError as error:
                raise _named(name, error) from error

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        name = self._choose(metadata)
        inner = await self._places[name].copy_log_segment_data(metadata, data)
        return encode_location(name, inner) if self._locations else inner

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview:
        place, metadata = self._place_of(metadata)
        return await place.fetch_log_segment(metadata, start_position, end_position)

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        place, metadata = self._place_of(metadata)
        return await place.fetch_indexes(metadata)

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        if metadata.custom_metadata is not None:
            place, metadata = self._place_of(metadata)
            return await place.delete_log_segment_data(metadata)
        deleted: list[bool] = []
        troubles: list[RemoteStorageError] = []
        for name, place in self._different_places():
            try:
                deleted.append(await place.delete_log_segment_data(metadata))
            except RemoteStorageError as error:
                troubles.append(_named(name, error))
        if troubles and deleted and troubles[0].retriable:
            raise SomeStoresInTroubleError(str(troubles[0])) from troubles[0]
        if troubles:
            raise troubles[0]
        return all(deleted)

    def place_of(self, metadata: RemoteLogSegmentMetadata) -> RemoteStorageManager:
        """The store that a segment's record names."""
        return self._place_of(metadata)[0]

    async def put_object(self, key: str, data: bytes) -> None:
        await self._home.put_object(key, data)

    async def get_object(self, key: str) -> bytes:
        """Segments' objects are looked for everywhere: who has only the key does not know the location."""
        try:
            return await self._home.get_object(key)
        except RemoteResourceNotFoundError:
            if parse_segment_key(key) is None:
                raise
            for name, place in self._different_places():
                if name != HOME:
                    try:
                        return await place.get_object(key)
                    except RemoteResourceNotFoundError:
                        continue
            raise

    async def delete_object(self, key: str) -> None:
        await self._home.delete_object(key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """One location after the other; each object says by `custom_metadata` where it lies."""
        for name, place in self._different_places():
            async for stored in place.list_objects(prefix):
                if self._locations:
                    yield replace(stored, custom_metadata=encode_location(name, stored.custom_metadata))
                else:
                    yield stored

    async def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        """Of the locations whose stores keep such things."""
        for name, place in self._different_places():
            if isinstance(place, UnfinishedUploads):
                async for upload in place.list_uploads():
                    yield replace(upload, location=name)

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        place = self._places[upload.location]
        if isinstance(place, UnfinishedUploads):
            await place.abort_upload(upload)

    async def close(self) -> None:
        for _, place in self._different_places():
            await place.close()

    def _different_places(self) -> list[tuple[str, RemoteStorageManager]]:
        """Two names of one place count once."""
        seen: dict[int, tuple[str, RemoteStorageManager]] = {}
        for name, place in self._places.items():
            seen.setdefault(id(place), (name, place))
        return list(seen.values())

    def _choose(self, metadata: RemoteLogSegmentMetadata) -> str:
        topic = metadata.topic_id_partition.topic
        candidates = [each for each in self._locations if each.weight > 0 and fnmatchcase(topic, each.topics)]
        total = sum(each.weight for each in candidates)
        point = metadata.segment_id.id.int % total if total else 0
        for each in candidates:
            point -= each.weight
            if point < 0:
                return each.name
        return HOME

    def _place_of(self, metadata: RemoteLogSegmentMetadata) -> tuple[RemoteStorageManager, RemoteLogSegmentMetadata]:
        name, inner = decode_location(metadata.custom_metadata)
        place = self._places.get(name)
        if place is None:
            known = ", ".join(repr(known) for known in self._places if known != HOME) or "none"
            raise RemoteStorageError(
                f"segment {metadata.segment_id.id} lies in the location {name!r}, which is not configured: "
                f"add [[storage.locations]] of that name (configured: {known})"
            )
        return place, replace(metadata, custom_metadata=inner)


def _named(name: str, error: RemoteStorageError) -> RemoteStorageError:
    if name == HOME:
        return error
    return (RetriableRemoteStorageError if error.retriable else RemoteStorageError)(f"location {name!r}: {error}")
