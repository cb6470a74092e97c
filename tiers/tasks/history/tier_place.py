"""`TierPlace` proves by a marker that the store is the place of the tier (docs/design.md, safety rule 5).

    <cluster id>/tier.json               {"version": 1, "clusterId": ..., "id": ...}
    <cluster id>/tier.<location>.json    the same, in a location beside home

The settings of a process may name another bucket or folder, or a file system may not be mounted. So the metadata has
the id of the marker object, and the store has the object. The id is announced in the metadata before the object is
written, and confirmed after it was read back. From then on, a store without this object is another place. Reads never
ask for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from tiers.errors import RemoteLogMetadataNotReadyError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TIER_PARTITION
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, TierMarkerUpdate
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.locations import HOME, decode_location
from tiers.storage.object_key import marker_key
from tiers.storage.remote_storage_manager import RemoteStorageManager

if TYPE_CHECKING:
    from tiers.tasks.task_services import TaskServices

NO_COPY = (
    "the store has neither the marker of the tier nor the segments that were copied: does [storage] name another place"
    " than that of the process which copied them, or is it not mounted? Correct that; nothing new is copied here"
)
_VERSION = 1
_SEGMENTS_PER_LOOK = 8


class _UnreadableMarkerError(RemoteStorageError):
    """The store has the object of the marker, and its content is damaged."""


class TierPlace:
    """The place of one process. A file system may be unmounted at any time, so the store is asked each time."""

    def __init__(self) -> None:
        self._marking = asyncio.Lock()
        self._skipped: dict[str, int] = {}
        """By location: the number of copied segments for which the store was asked without success."""

    async def require(self, services: TaskServices, segments: Iterable[RemoteLogSegmentMetadata] = ()) -> None:
        """Raises `RemoteStorageError` unless home and the locations of the segments have the markers of this tier.

        Costs a GET for each of these locations. The first process that needs a location writes its marker. Raises the
        errors of the store and of the metadata manager."""
        for location in sorted({HOME, *map(location_of, segments)}):
            known = services.state.tier_marker(location)
            if known is None or not known.is_confirmed:
                async with self._marking:
                    known = await self._marked(services, location)
            _compare(known, await read_marker(services.storage, services.cluster_id, location))

    async def _marked(self, services: TaskServices, location: str) -> TierMarkerUpdate:
        metadata, storage = services.metadata, services.storage
        await metadata.log.ensure_fresh(TIER_PARTITION, 0, services.settings.request_timeout_ms)
        known = metadata.state.tier_marker(location)
        if known is not None and known.is_confirmed:
            return known
        found: UUID | None = None
        with suppress(_UnreadableMarkerError):  # the store may have damaged it when it was written
            found = await read_marker(storage, services.cluster_id, location)
        if found is None:
            if not services.knows_all_partitions:
                raise RemoteLogMetadataNotReadyError(
                    "it is unknown whether any partition was copied, so it is unknown whether this store is the right"
                    " one"
                )
            skipped = self._skipped.get(location, 0)
            is_found, self._skipped[location] = await find_copied(storage, metadata.state, location, skipped)
            if not is_found:
                raise RemoteStorageError(NO_COPY)
        if known is None:
            await metadata.put_tier_marker(location, found or uuid4(), is_confirmed=False)
            services.checkpoint("marker-announced")
            known = metadata.state.tier_marker(location)
            assert known is not None
        if found is None:
            await write_marker(storage, services.cluster_id, location, known.marker_id)
            services.checkpoint("marker-written")
            found = await read_marker(storage, services.cluster_id, location)
        _compare(known, found)
        await metadata.put_tier_marker(location, known.marker_id, is_confirmed=True)
        return known


def location_of(segment: RemoteLogSegmentMetadata) -> str:
    return decode_location(segment.custom_metadata)[0]


async def find_copied(
    storage: RemoteStorageManager, metadata: RemoteLogMetadataState, location: str, skipped: int = 0
) -> tuple[bool, int]:
    """Returns whether a location has one of the segments that were copied there, or none was copied.

    It asks for a few of them, from number `skipped` on, and one is enough. The second result is the number for the next
    call: the store may have lost some. Raises the store's errors, and `LaterFormatError` for an old layout."""
    copied = (
        each.metadata
        for partition in metadata.partitions()
        for each in metadata.stored_segments(partition)
        if each.is_finished and location_of(each.metadata) == location
    )
    asked = list(islice(copied, skipped, skipped + _SEGMENTS_PER_LOOK))
    for segment in asked:
        with suppress(RemoteResourceNotFoundError):
            decode_indexes_object(await storage.fetch_indexes(segment), segment)
            return True, skipped
    return not asked and not skipped, 0 if len(asked) < _SEGMENTS_PER_LOOK else skipped + len(asked)


async def missing_marker(
    storage: RemoteStorageManager, metadata: RemoteLogMetadataState, cluster_id: str, location: str
) -> UUID | None:
    """Returns the id of the marker that a location lacks by the metadata, or that is damaged; None: it lacks none.

    Raises `RemoteStorageError` when the store has the marker of another tier."""
    known, found = metadata.tier_marker(location), None
    with suppress(_UnreadableMarkerError):
        found = await read_marker(storage, cluster_id, location)
    if known is not None and found is None:
        return known.marker_id
    if known is not None:
        _compare(known, found)
    return None


async def write_marker(storage: RemoteStorageManager, cluster_id: str, location: str, marker_id: UUID) -> None:
    document = {"version": _VERSION, "clusterId": cluster_id, "id": str(marker_id)}
    await storage.put_object(marker_key(cluster_id, location), json.dumps(document).encode())


async def read_marker(storage: RemoteStorageManager, cluster_id: str, location: str = HOME) -> UUID | None:
    """Returns the id that the marker object has; None: the store has no such object.

    Raises `RemoteStorageError` when the object cannot be read."""
    key = marker_key(cluster_id, location)
    try:
        document = json.loads(await storage.get_object(key))
        if document["version"] == _VERSION and document["clusterId"] == cluster_id:
            return UUID(document["id"])
    except RemoteResourceNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnreadableMarkerError(f"the object {key} cannot be read: {error!r}") from error
    raise RemoteStorageError(f"the object {key} is of another cluster, or of a later release")


def _compare(known: TierMarkerUpdate, found: UUID | None) -> None:
    name = marker_key("", known.location)[1:]
    if found is None:
        raise RemoteStorageError(
            f"the store does not have the marker {name}: does [storage] name another place than before, or is"
            " it not mounted? Correct that; nothing is copied, trimmed or deleted here. If the store lost it,"
            " `tidegate tier accept` writes it again"
        )
    if found != known.marker_id:
        raise RemoteStorageError(
            f"the marker {name} of the store names the place {found}, and the metadata {known.marker_id}: does"
            " [storage] name the place of another tier? Correct that; nothing is copied, trimmed or deleted here"
        )
