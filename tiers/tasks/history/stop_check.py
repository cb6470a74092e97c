"""`may_be_in_doubt` checks, without writing, whether the owner may doubt the past (docs/design.md, safety rule 5).

The owner's own checks (`FactsTask`, `LogGapTask`) write, and need the ownership. The check here is stricter than the
owner: if it finds no reason, the owner has none either. It may find a reason where the owner goes on, for example while
a copy finishes.
"""

from __future__ import annotations

from tiers.metadata.log_bounds import unexplained_runs, unexplained_trim
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.history.stored_facts import StoredFacts, lost_reason


async def may_be_in_doubt(
    storage: RemoteStorageManager,
    metadata: RemoteLogMetadataManager,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int | None,
    stored: StoredFacts,
    timeout_ms: int,
) -> bool:
    """Returns whether the owner may have a reason to doubt the past. False: there is nothing to accept.

    `bounds` are the leader's, and `log_start` is the recorded one. Raises the errors of the brokers and of the
    store."""
    start = log_start or 0
    if await unexplained_runs(metadata, partition, start, bounds.log_start_offset):
        return True
    if unexplained_trim(metadata, partition, start) is not None:
        return True
    return bool(await lost_reason(storage, metadata, partition, stored, timeout_ms))
