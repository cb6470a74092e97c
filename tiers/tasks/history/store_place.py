"""`StorePlace` checks that the store is the place of the tier, by what it has of other partitions.

The settings of this process may name another bucket or folder than those of the other processes, or a file system may
not be mounted at its folder. The copies would go where no other process reads them, and this process would not find
them after the next mount. The brokers' records would be trimmed. A partition that was copied before has its own
manifest and segments for this check (`PartitionManifestTask`). A new partition has only those of the others, and so has
a partition that has neither its manifest nor a segment in the home location. Segments in other locations
(`[[storage.locations]]`) do not count: manifests and new copies go to the home location.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

from tiers.errors import RemoteLogMetadataNotReadyError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition
from tiers.storage.locations import HOME, decode_location
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.remote_storage_manager import RemoteStorageManager

_PROBED_PARTITIONS = 3
_PROBED_SEGMENTS = 3


class StorePlace:
    """The store of one process. A file system may be unmounted at any time, so the store is asked each time."""

    def __init__(self) -> None:
        self._asked = 0
        """The number of copied partitions, from the first on, for which the store was asked without success."""

    async def check(
        self,
        storage: RemoteStorageManager,
        metadata: RemoteLogMetadataReader,
        cluster_id: str,
        *,
        knows_all_partitions: bool,
    ) -> bool:
        """Raises `RemoteStorageError` when the store has nothing of the partitions that were copied.

        It asks for a few of them, and one is enough. The next call asks for others: the store may have lost some of
        them. Returns False when no partition was ever copied: every place is right then. Without
        `knows_all_partitions`, it raises `RemoteLogMetadataNotReadyError` instead of this conclusion."""
        probed = _copied(metadata, self._asked)
        if not probed:
            self._asked, probed = 0, _copied(metadata, 0)
        for number, partition in enumerate(probed, self._asked):
            self._asked = number + 1  # before the store is asked, which may always fail for this partition
            has_manifest = await _has_manifest_of(storage, cluster_id, partition)
            if has_manifest or await has_segment_of(storage, metadata, partition, is_home=True):
                self._asked = number
                return True
        if not (probed or knows_all_partitions):
            raise RemoteLogMetadataNotReadyError(
                "it is unknown whether any partition was copied, so it is unknown whether this store is the right one"
            )
        if probed:
            raise RemoteStorageError(
                f"the store has neither the manifests nor the oldest segments of {', '.join(map(str, probed))}, which"
                " were copied: does [storage] name another place than that of the process which copied them, or is it"
                " not mounted? Correct that; nothing new is copied here"
            )
        return False


def _copied(metadata: RemoteLogMetadataReader, skipped: int) -> list[TopicIdPartition]:
    """Returns a few of the partitions that have a readable segment. The first `skipped` ones are left out."""
    copied = (each for each in metadata.partitions() if metadata.earliest_offset(each) is not None)
    return [*islice(copied, skipped, skipped + _PROBED_PARTITIONS)]


async def has_segment_of(
    storage: RemoteStorageManager,
    metadata: RemoteLogMetadataReader,
    partition: TopicIdPartition,
    *,
    is_home: bool = False,
) -> bool:
    """Whether the store has one of the oldest segments of the partition, which are not merely late.

    `is_home`: only segments in the home location count. Raises the store's errors."""
    finished = [each for each in metadata.stored_segments(partition) if each.is_finished]
    oldest = (each.metadata for each in sorted(finished, key=lambda segment: segment.event_timestamp_ms))
    probed = (each for each in oldest if not is_home or decode_location(each.custom_metadata)[0] == HOME)
    for segment in islice(probed, _PROBED_SEGMENTS):
        with suppress(RemoteResourceNotFoundError):
            await storage.fetch_indexes(segment)
            return True
    return False


async def _has_manifest_of(storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition) -> bool:
    try:
        await storage.get_object(partition_manifest_key(cluster_id, partition))
    except RemoteResourceNotFoundError:
        return False
    return True
