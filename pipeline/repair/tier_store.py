"""`TierStore`: the store of a tier, as a task names it and finds it wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config import PipelineConfig
from pipeline.worker import worker
from tiers.storage.locations import LocatedRemoteStorageManager


@dataclass(frozen=True, slots=True)
class TierStore:
    """`cluster_id` as object keys have it."""

    config: PipelineConfig = field(repr=False)
    cluster_id: str

    async def opened(self) -> LocatedRemoteStorageManager:
        """That of this process. Raises `RemoteTierError`, `RemoteLogError`."""
        return await worker().storage(self.config, self.cluster_id)
