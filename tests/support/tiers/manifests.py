"""`Manifests`: the manifest of one partition, its owner's task, and a store that counts its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, Workbench, with_retention
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import (
    RetriableRemoteStorageError,
)
from tiers.metadata.partition_manifest import (
    PartitionManifest,
    decode_partition_manifest,
)
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.object_key import parse_segment_key, partition_manifest_key
from tiers.storage.remote_storage_manager import Version
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.retention.trim_task import TrimTask
from tiers.tasks.task_services import TaskServices

KEY = partition_manifest_key("cluster", PARTITION)


async def copied(bench: Workbench) -> None:
    """Offsets 0 to 89 in three segments; ten more are only local."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.copy_all()


class CountingStorage(LocalRemoteStorageManager):
    """`asked` is every request for an object of no segment, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__({"path": str(root), "cluster.id": "cluster"})
        self.asked: list[str] = []
        self.fails = False

    async def put_object(self, key: str, data: bytes, if_match: Version | None = None) -> Version | None:
        self.asked.append(f"put {key}")
        if self.fails:
            raise RetriableRemoteStorageError("503")
        return await super().put_object(key, data, if_match)

    async def get_object(self, key: str) -> bytes:
        if parse_segment_key(key) is None:
            self.asked.append(f"get {key}")
        return await super().get_object(key)


class Manifests:
    def __init__(self, bench: Workbench, storage: CountingStorage) -> None:
        self.bench, self.storage = bench, storage
        self.services: TaskServices = replace(bench.services, storage=storage)
        self.task = self.new_owner()

    def new_owner(self) -> PartitionManifestTask:
        self.task = PartitionManifestTask(self.services, PARTITION)
        return self.task

    async def round(self) -> list[str]:
        """Returns the requests of the end of a round to the store."""
        before = len(self.storage.asked)
        await self.task.check()
        await self.task.run()
        return [one.split()[0] for one in self.storage.asked[before:]]

    async def stored(self) -> PartitionManifest:
        return decode_partition_manifest(await self.storage.get_object(KEY))


async def trimmed(manifests: Manifests, policy: TopicPolicy) -> tuple[list[str], int | None]:
    """Returns the requests of a trim to the store, and its end."""
    await manifests.round()
    bench, before = manifests.bench, len(manifests.storage.asked)
    task = TrimTask(manifests.services, PARTITION, manifests.task)
    end = await task.run(policy, bench.copy_task.local_only_bytes)
    return [one.split()[0] for one in manifests.storage.asked[before:]], end


KEEP_NOTHING = with_retention(local_retention_bytes=0)
