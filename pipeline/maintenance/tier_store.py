"""`TierStore`: names the store of a tier, so that a task can open it in any process."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config import PipelineConfig
from pipeline.spark.worker import worker
from tiers.storage.locations import LocatedRemoteStorageManager


@dataclass(frozen=True, slots=True)
class TierStore:
    """`cluster_id` is the one in object keys."""

    config: PipelineConfig = field(repr=False)
    cluster_id: str

    async def opened(self) -> LocatedRemoteStorageManager:
        """Returns this process's open store. Raises `RemoteTierError`, `RemoteLogError`."""
        return await worker().storage(self.config, self.cluster_id)
