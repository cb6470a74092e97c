"""A process that copies, trims and expires one topic. It can kill itself with SIGKILL right after a named step.

    python -m tests.support.servers.copier '{"bootstrap": ["localhost", 9092], "topic": "t", "folder": "/tmp/x", ...}'

`folder` holds the remote tier (`remote`), the spool, and the metadata. The metadata is a journal, or with
`metadata_topic` the saved state of that topic. The process runs until SIGTERM. It handles SIGTERM after it has printed
`ready`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from tests.support.fakes.metadata_topic import FakeMetadataTopic, FakeTopicMetadataManager
from tests.support.rigs.metadata_managers import TopicBasedManager
from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.storage.local import LocalRemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices
from tiers.tasks.tiered_topics import TieredTopics

OPEN_TIMEOUT_MS = 300_000
COPIER = "copier"
"""The name of the process that owns the journal."""


@dataclass(frozen=True, slots=True)
class CopierOptions:
    """Options of the process. `kill_after` is the name of a checkpoint.

    The process kills itself when it reaches that checkpoint for the `kill_at`-th time."""

    bootstrap: tuple[str, int]
    topic: str
    folder: str
    segment_bytes: int = 30_000
    segment_ms: int = 300
    local_retention_bytes: int = 0
    visible_after_ms: int = 100
    metadata_topic: str = ""
    kill_after: str = ""
    kill_at: int = 1

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.servers.copier", json.dumps(asdict(self))]

    @property
    def remote_folder(self) -> Path:
        return Path(self.folder) / "remote"

    @property
    def state_folder(self) -> Path:
        return Path(self.folder) / "state"

    @property
    def spool_folder(self) -> Path:
        return Path(self.folder) / "spool"

    def store(self) -> LocalRemoteStorageManager:
        return LocalRemoteStorageManager({"path": str(self.remote_folder), "cluster.id": "cluster"})

    def following(self, name: str) -> FakeTopicMetadataManager:
        """Returns a process of this name that follows the journal. Only the copier may write it."""
        log = FakeMetadataTopic(
            lambda: time.time_ns() // 1_000_000, owner=COPIER, journal=Path(self.folder) / "journal"
        )
        return FakeTopicMetadataManager(log, name, Path(self.folder) / name, lambda: time.monotonic_ns() // 1_000_000)

    def metadata(self, client: BrokerClient) -> RemoteLogMetadataManager:
        if not self.metadata_topic:
            return self.following(COPIER)
        topic = MetadataTopicSettings(self.metadata_topic, partition_count=1)
        settings = TopicBasedSettings(self.state_folder, topic=topic, open_timeout_ms=OPEN_TIMEOUT_MS)
        return TopicBasedManager(client, settings)


def killer(options: CopierOptions) -> Callable[[str], None]:
    reached = 0

    def checkpoint(name: str) -> None:
        nonlocal reached
        reached += name == options.kill_after
        if reached == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return checkpoint


async def run(options: CopierOptions) -> None:
    options.remote_folder.mkdir(exist_ok=True)
    client = BrokerClient([options.bootstrap], client_id="copier")
    store, metadata = options.store(), options.metadata(client)
    await client.open()
    await store.open()
    await metadata.log.open()
    settings = RemoteLogManagerSettings(
        spool_dir=options.spool_folder,
        fetch_bytes=20_000,
        remote_log=RemoteLogConfig(
            task_interval_ms=50, task_retry_backoff_ms=10, visible_after_ms=options.visible_after_ms
        ),
    )
    metrics = RemoteLogManagerMetrics(CollectorRegistry())
    rule = TopicConfig(
        pattern=options.topic,
        local_retention_bytes=options.local_retention_bytes,
        segment_bytes=options.segment_bytes,
        segment_ms=options.segment_ms,
    )
    services = TaskServices(
        source=BrokerLogSource(client),
        share_groups=ClusterShareGroups(client),
        storage=store,
        metadata=metadata,
        settings=settings,
        metrics=metrics,
        spool=Spool(settings.spool_dir, settings.spool_max_bytes, settings.spool_threads),
        cluster_id="cluster",
        checkpoint=killer(options),
    )
    manager = RemoteLogManager(services, TieredTopics(client, [rule], metrics))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, manager.stop)
    print("ready", flush=True)
    try:
        await manager.run()
    finally:
        await metadata.log.close()
        await store.close()
        await client.close()


def main() -> None:
    values: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(run(CopierOptions(**values | {"bootstrap": tuple(values["bootstrap"])})))


if __name__ == "__main__":
    main()
