"""`LocatedRemoteStorageManager` spreads segments over several locations: buckets, prefixes or whole stores.

    custom metadata (KIP-917) = "TGL" | 1 | flags | length of the name | name | the store's own custom metadata

* It chooses a location for each segment and records it in the segment's custom metadata. Reads and deletes use only
  that record, so the locations for new segments can change at any time. If a recorded location is no longer configured,
  the error names it.
* *Home* is the store of `[storage]` itself. It holds the segments for which no location was chosen, those from before
  locations were configured, and the small objects.
* An unfinished copy has no record. Its objects are deleted in every location.
* Each call of a method of the contract is measured.
* Each location has a circuit breaker for writes. While it is open, copies, deletions and small objects fail at once.
* The choice is a function of the segment's uuid, so a repeated copy goes to the same location.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

from tiers.errors import (
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.circuit_breaker import CircuitBreakers, loop_ms
from tiers.storage.metrics import RemoteStorageMetrics
from tiers.storage.object_key import marked_location, parse_segment_key
from tiers.storage.outages import StoreOutage, StoreOutages
from tiers.storage.remote_storage_manager import (
    Allocate,
    LogSegmentData,
    ReadsIntoMemory,
    RemoteStorageManager,
    StoredObject,
    UnfinishedUpload,
    UnfinishedUploads,
    check_by_an_object,
)

HOME = ""
RETRY_MS = 1_000
"""How long a store that was down at the start is left alone after an attempt to open it."""
logger = logging.getLogger(__name__)
_MAGIC = b"TGL\x01"
_HAS_INNER = 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """A location. It takes new segments of the topics that match `topics`, a shell pattern.

    `weight` is its share of these segments; with 0 it takes no new segments."""

    name: str
    storage: RemoteStorageManager
    weight: int = 1
    topics: str = "*"


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


class _Place:
    """A store, by the first of its names.

    A store that was down at the start is opened by the first call that needs it. While it is closed, calls fail by the
    error of the last attempt, at most one attempt in `RETRY_MS`."""

    def __init__(self, name: str, storage: RemoteStorageManager, breakers: CircuitBreakers) -> None:
        self.name = name
        self.storage = storage
        self.outage = StoreOutage(name, loop_ms)
        self._breakers = breakers
        self._opening = asyncio.Lock()
        self._error: RemoteStorageError | None = None
        self._again_at_ms = 0

    async def open(self) -> None:
        try:
            await self.storage.open()
        except RemoteStorageError as error:
            self._error, self._again_at_ms = error, loop_ms() + RETRY_MS
            raise
        self._error = None

    async def open_or_later(self) -> None:
        """Opens the store, or lets a later call do it. Raises the error of a store that refuses."""
        try:
            await self.open()
        except RemoteStorageError as error:
            if not error.retriable:
                raise
            self.outage.failed(error)
            logger.warning(
                "a store is down: it is opened when it is needed",
                extra={"location": self.name or "home", "error": str(error)},
            )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[RemoteStorageManager]:
        """Yields the open store for one call, and notes whether it answers. Raises its error while it is closed."""
        began_ms = loop_ms()
        try:
            async with self._opening:
                if self._error is not None:
                    if began_ms < self._again_at_ms:
                        raise self._error
                    await self.open()
            yield self.storage
        except asyncio.CancelledError:
            self.outage.given_up(loop_ms() - began_ms)
            raise
        except RemoteStorageError as error:
            self.outage.failed(error)
            raise
        self.outage.answered()

    @asynccontextmanager
    async def to_write(self) -> AsyncIterator[RemoteStorageManager]:
        """Yields the open store for one call, which the circuit breaker counts."""
        with self._breakers.of(self.name):
            async with self.opened() as storage:
                yield storage


def _measured(bytes_of: Callable[..., int] | None = None) -> Callable[[Method], Method]:
    """Makes a method measure its calls. `bytes_of` takes its result and its arguments."""

    def measured(method: Method) -> Method:
        async def call(self: LocatedRemoteStorageManager, /, *args: Any, **kwargs: Any) -> Any:
            with self.metrics.call(method.__name__):
                result = await method(self, *args, **kwargs)
            if bytes_of is not None:
                self.metrics.moved(method.__name__, bytes_of(result, *args, **kwargs))
            return result

        return cast(Method, call)

    return measured


class LocatedRemoteStorageManager:
    """The store with all its locations.

    Without locations it only passes calls to `home`, but still raises for a segment that is recorded elsewhere."""

    def __init__(
        self,
        home: RemoteStorageManager,
        locations: Sequence[StorageLocation] = (),
        metrics: RemoteStorageMetrics | None = None,
    ) -> None:
        """Raises `ValueError` for invalid names and for names that occur twice."""
        self.metrics = metrics or RemoteStorageMetrics(CollectorRegistry(), "")
        self.write_breakers = CircuitBreakers(loop_ms, counts_cancelled=False)
        self._locations = locations
        self._home = _Place(HOME, home, self.write_breakers)
        self._places = {HOME: self._home}
        """By each of their names. Several may name one place."""
        places = {id(home): self._home}
        for location in locations:
            if not _NAME.fullmatch(location.name):
                raise ValueError(f"location {location.name!r}: expected up to 64 letters, digits, '.', '_' and '-'")
            if location.name in self._places:
                raise ValueError(f"two locations are called {location.name!r}")
            place = _Place(location.name, location.storage, self.write_breakers)
            self._places[location.name] = places.setdefault(id(location.storage), place)
        self._different = list(places.values())
        self.outages = StoreOutages([place.outage for place in self._different])

    @_measured()
    async def open(self) -> None:
        await self._at_all(_Place.open)

    async def open_or_later(self) -> None:
        """Opens the stores. A store that is down is opened by the first call that needs it.

        Raises `RemoteStorageError` only for a store that refuses, because an operator must change something."""
        await self._at_all(_Place.open_or_later)

    def use_memory(self, allocate: Allocate) -> None:
        for place in self._different:
            if isinstance(place.storage, ReadsIntoMemory):
                place.storage.use_memory(allocate)

    @_measured()
    async def check(self) -> None:
        async def check(place: _Place) -> None:
            async with place.opened() as storage:
                await check_by_an_object(storage)

        await self._at_all(check)

    @_measured(lambda _, metadata, data: metadata.segment_size_bytes + len(data.indexes))
    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        name = self._choose(metadata)
        async with self._places[name].to_write() as storage:
            inner = await storage.copy_log_segment_data(metadata, data)
        return encode_location(name, inner) if self._locations else inner

    @_measured(lambda view, *_: len(view))
    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        place, metadata = self._place_of(metadata)
        async with place.opened() as storage:
            return await storage.fetch_log_segment(metadata, start_position, end_position)

    @_measured(lambda indexes, *_: len(indexes))
    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        place, metadata = self._place_of(metadata)
        async with place.opened() as storage:
            return await storage.fetch_indexes(metadata)

    @_measured()
    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        async def delete(place: _Place) -> bool:
            async with place.to_write() as storage:
                return await storage.delete_log_segment_data(metadata)

        if metadata.custom_metadata is None:
            return all(await self._at_all(delete))
        place, metadata = self._place_of(metadata)
        return await delete(place)

    def place_of(self, metadata: RemoteLogSegmentMetadata) -> RemoteStorageManager:
        """Returns the store that is recorded for the segment."""
        return self._place_of(metadata)[0].storage

    def _named_place(self, key: str) -> _Place:
        """Returns the location of a small object: that of a marker is in its key, and all others are at home."""
        name = marked_location(key)
        if name not in self._places:
            raise RemoteStorageError(f"location {name!r} is not configured: add [[storage.locations]] with that name")
        return self._places[name]

    @_measured(lambda _, key, data: len(data))
    async def put_object(self, key: str, data: bytes) -> None:
        async with self._named_place(key).to_write() as storage:
            await storage.put_object(key, data)

    @_measured(lambda data, *_: len(data))
    async def get_object(self, key: str) -> bytes:
        """Reads an object. Looks for a segment's object in every location, because its key does not name one."""
        named = self._named_place(key)
        others = [] if parse_segment_key(key) is None else self._different[1:]
        for place in (named, *others):
            try:
                async with place.opened() as storage:
                    return await storage.get_object(key)
            except RemoteResourceNotFoundError as error:
                missing = error
        raise missing

    @_measured()
    async def delete_object(self, key: str) -> None:
        async with self._home.to_write() as storage:
            await storage.delete_object(key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields the objects, location by location. The `custom_metadata` of each object names its location."""
        with self.metrics.call("list_objects"):
            for place in self._different:
                async with place.opened() as storage:
                    async for stored in storage.list_objects(prefix):
                        if self._locations:
                            yield replace(stored, custom_metadata=encode_location(place.name, stored.custom_metadata))
                        else:
                            yield stored

    async def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        """Yields the unfinished uploads of all locations whose stores support them."""
        for place in self._different:
            async with place.opened() as storage:
                if isinstance(storage, UnfinishedUploads):
                    async for upload in storage.list_uploads():
                        yield replace(upload, location=place.name)

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        async with self._places[upload.location].opened() as storage:
            if isinstance(storage, UnfinishedUploads):
                await storage.abort_upload(upload)

    async def close(self) -> None:
        for place in self._different:
            await place.storage.close()

    async def _at_all(self, call: Callable[[_Place], Awaitable[T]]) -> list[T]:
        """Makes the call at every store, also after one failed. Raises the first error, which names the location."""
        results: list[T] = []
        troubles: list[RemoteStorageError] = []
        for place in self._different:
            try:
                results.append(await call(place))
            except RemoteStorageError as error:
                kind = RetriableRemoteStorageError if error.retriable else RemoteStorageError
                troubles.append(error if place.name == HOME else kind(f"location {place.name!r}: {error}"))
        if troubles:
            raise troubles[0]
        return results

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

    def _place_of(self, metadata: RemoteLogSegmentMetadata) -> tuple[_Place, RemoteLogSegmentMetadata]:
        name, inner = decode_location(metadata.custom_metadata)
        if name not in self._places:
            known = ", ".join(repr(known) for known in self._places if known != HOME) or "none"
            raise RemoteStorageError(
                f"segment {metadata.segment_id.id} is stored in location {name!r}, which is not configured: "
                f"add [[storage.locations]] with that name (configured: {known})"
            )
        return self._places[name], replace(metadata, custom_metadata=inner)
