"""`LocatedRemoteStorageManager` spreads segments over several locations: buckets, prefixes or whole stores.

    custom metadata (KIP-917) = "TGL" | 1 | flags | length of the name | name | the store's own custom metadata

* It chooses a location for each segment and records it in the segment's custom metadata. Reads and deletes use only
  that record, so the locations for new segments can change at any time. If a recorded location is no longer configured,
  the error names it.
* *Home* is the store of `[storage]` itself. It holds the segments for which no location was chosen, those from before
  locations were configured, and the small objects.
* An unfinished copy has no record. Its objects are deleted in every location.
* Each location has a circuit breaker for writes. While it is open, copies, deletions and small objects fail at once.
* The choice is a function of the segment's uuid, so a repeated copy goes to the same location.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from tiers.errors import (
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.circuit_breaker import CircuitBreakers, loop_ms
from tiers.storage.late_opening import LateOpening
from tiers.storage.object_key import marked_location, parse_segment_key
from tiers.storage.remote_storage_manager import (
    Allocate,
    LogSegmentData,
    ReadsIntoMemory,
    RemoteStorageManager,
    StoredObject,
    StoreFeatures,
    UnfinishedUpload,
    UnfinishedUploads,
)

HOME = ""
logger = logging.getLogger(__name__)
_MAGIC = b"TGL\x01"
_HAS_INNER = 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """A location. It takes new segments of the topics that match `topics`, a shell pattern.

    `weight` is its share of these segments; with 0 it takes no new segments."""

    name: str
    storage: RemoteStorageManager
    weight: int = 1
    topics: str = "*"


def check_location_name(name: str) -> str:
    """Returns the name. Raises `ValueError` when it is invalid."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"location {name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
    return name


def encode_location(name: str, inner: bytes | None) -> bytes:
    encoded = name.encode()
    return _MAGIC + bytes((0 if inner is None else _HAS_INNER, len(encoded))) + encoded + (inner or b"")


def decode_location(custom_metadata: bytes | None) -> tuple[str, bytes | None]:
    """Returns the location's name and the store's own custom metadata; `HOME` when no location is recorded.

    Raises `RemoteStorageError` for truncated custom metadata.
    """
    if custom_metadata is None or not custom_metadata.startswith(_MAGIC):
        return HOME, custom_metadata
    start = len(_MAGIC) + 2
    if len(custom_metadata) < start or len(custom_metadata) < start + custom_metadata[start - 1]:
        raise RemoteStorageError("the segment's custom metadata is cut off, so its location is unknown")
    end = start + custom_metadata[start - 1]
    inner = custom_metadata[end:] if custom_metadata[start - 2] & _HAS_INNER else None
    return custom_metadata[start:end].decode(errors="replace"), inner


class LocatedRemoteStorageManager:
    """The store with all its locations.

    Without locations it only passes calls to `home`, but still raises for a segment that is recorded elsewhere."""

    def __init__(
        self,
        home: RemoteStorageManager,
        locations: Sequence[StorageLocation] = (),
        clock_ms: Callable[[], int] = loop_ms,
    ) -> None:
        """Raises `ValueError` for invalid names and for names that occur twice."""
        self._home = home
        self._locations = locations
        self._places: dict[str, RemoteStorageManager] = {HOME: home}
        for location in locations:
            if check_location_name(location.name) in self._places:
                raise ValueError(f"two locations are called {location.name!r}")
            self._places[location.name] = location.storage
        self._late: dict[int, LateOpening] = {}
        """The stores that were down when `open_or_later` was called, by their id."""
        self._clock_ms = clock_ms
        self.write_breakers = CircuitBreakers(clock_ms, counts_cancelled=False)

    async def open(self) -> None:
        for name, place in self._different_places():
            try:
                await place.open()
            except RemoteStorageError as error:
                raise _named(name, error) from error

    async def open_or_later(self) -> None:
        """Opens the stores. A store that is down is opened by the first call that needs it.

        Raises `RemoteStorageError` only for a store that refuses, because an operator must change something."""
        for name, place in self._different_places():
            late = LateOpening(place, self._clock_ms)
            try:
                await late.opened()
            except RemoteStorageError as error:
                if not error.retriable:
                    raise _named(name, error) from error
                logger.warning(
                    "a store is down: it is opened when it is needed",
                    extra={"location": name or "home", "error": str(error)},
                )
                self._late[id(place)] = late

    async def _ready(self, place: RemoteStorageManager) -> RemoteStorageManager:
        """Returns the store, open. Raises its error while it is down."""
        late = self._late.get(id(place))
        return place if late is None else await late.opened()

    def use_memory(self, allocate: Allocate) -> None:
        for _, place in self._different_places():
            if isinstance(place, ReadsIntoMemory):
                place.use_memory(allocate)

    async def check(self) -> None:
        for name, place in self._different_places():
            try:
                await (await self._ready(place)).check()
            except RemoteStorageError as error:
                raise _named(name, error) from error

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        name = self._choose(metadata)
        with self.write_breakers.of(name):
            inner = await (await self._ready(self._places[name])).copy_log_segment_data(metadata, data)
        return encode_location(name, inner) if self._locations else inner

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        _, place, metadata = self._place_of(metadata)
        return await (await self._ready(place)).fetch_log_segment(metadata, start_position, end_position)

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        _, place, metadata = self._place_of(metadata)
        return await (await self._ready(place)).fetch_indexes(metadata)

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        if metadata.custom_metadata is not None:
            name, place, metadata = self._place_of(metadata)
            with self.write_breakers.of(name):
                return await (await self._ready(place)).delete_log_segment_data(metadata)
        deleted: list[bool] = []
        troubles: list[RemoteStorageError] = []
        for name, place in self._different_places():
            try:
                with self.write_breakers.of(name):
                    deleted.append(await (await self._ready(place)).delete_log_segment_data(metadata))
            except RemoteStorageError as error:
                troubles.append(_named(name, error))
        if troubles:
            raise troubles[0]
        return all(deleted)

    def place_of(self, metadata: RemoteLogSegmentMetadata) -> RemoteStorageManager:
        """Returns the store that is recorded for the segment."""
        return self._place_of(metadata)[1]

    async def probe(self) -> Sequence[StoreFeatures]:
        """Probes every store, also after one failed. Raises the first error."""
        found: list[StoreFeatures] = []
        troubles: list[RemoteStorageError] = []
        for name, place in self._different_places():
            try:
                found += [replace(each, location=name) for each in await (await self._ready(place)).probe()]
            except RemoteStorageError as error:
                troubles.append(_named(name, error))
        if troubles:
            raise troubles[0]
        return found

    def _named_place(self, key: str) -> tuple[str, RemoteStorageManager]:
        """Returns the location of a small object: that of a marker is in its key, and all others are at home."""
        name = marked_location(key)
        place = self._places.get(name)
        if place is None:
            raise RemoteStorageError(f"location {name!r} is not configured: add [[storage.locations]] with that name")
        return name, place

    async def put_object(self, key: str, data: bytes) -> None:
        name, place = self._named_place(key)
        with self.write_breakers.of(name):
            await (await self._ready(place)).put_object(key, data)

    async def get_object(self, key: str) -> bytes:
        """Reads an object. Looks for a segment's object in every location, because its key does not name one."""
        _, named = self._named_place(key)
        try:
            return await (await self._ready(named)).get_object(key)
        except RemoteResourceNotFoundError:
            if parse_segment_key(key) is None:
                raise
            for name, place in self._different_places():
                if name != HOME:
                    try:
                        return await (await self._ready(place)).get_object(key)
                    except RemoteResourceNotFoundError:
                        continue
            raise

    async def delete_object(self, key: str) -> None:
        with self.write_breakers.of(HOME):
            await (await self._ready(self._home)).delete_object(key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields the objects, location by location. The `custom_metadata` of each object names its location."""
        for name, place in self._different_places():
            async for stored in (await self._ready(place)).list_objects(prefix):
                if self._locations:
                    yield replace(stored, custom_metadata=encode_location(name, stored.custom_metadata))
                else:
                    yield stored

    async def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        """Yields the unfinished uploads of all locations whose stores support them."""
        for name, place in self._different_places():
            store = await self._ready(place)
            if isinstance(store, UnfinishedUploads):
                async for upload in store.list_uploads():
                    yield replace(upload, location=name)

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        place = await self._ready(self._places[upload.location])
        if isinstance(place, UnfinishedUploads):
            await place.abort_upload(upload)

    async def close(self) -> None:
        for _, place in self._different_places():
            await place.close()

    def _different_places(self) -> list[tuple[str, RemoteStorageManager]]:
        """Returns the distinct stores; a store with two names occurs once."""
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

    def _place_of(
        self, metadata: RemoteLogSegmentMetadata
    ) -> tuple[str, RemoteStorageManager, RemoteLogSegmentMetadata]:
        name, inner = decode_location(metadata.custom_metadata)
        place = self._places.get(name)
        if place is None:
            known = ", ".join(repr(known) for known in self._places if known != HOME) or "none"
            raise RemoteStorageError(
                f"segment {metadata.segment_id.id} is stored in location {name!r}, which is not configured: "
                f"add [[storage.locations]] with that name (configured: {known})"
            )
        return name, place, replace(metadata, custom_metadata=inner)


def _named(name: str, error: RemoteStorageError) -> RemoteStorageError:
    if name == HOME:
        return error
    return (RetriableRemoteStorageError if error.retriable else RemoteStorageError)(f"location {name!r}: {error}")
