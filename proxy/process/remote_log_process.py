"""The process that owns: it maintains the metadata's state that the other processes share, and runs the RLM tasks."""

from __future__ import annotations

import logging
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from proxy.process.admin.process_alarms import ProcessAlarm, troubles_of
from proxy.process.admin.process_view import ProcessView
from proxy.process.checks.own_rights import OwnRights
from proxy.process.checks.probes import run_probes
from proxy.process.live_settings import LiveSettings
from proxy.process.local_indexes import writer_of_local_indexes
from proxy.process.metadata_changes import MetadataChangeServer
from proxy.process.remote_log import open_metadata, open_storage, run_remote_log_manager, wait_for_cluster_id
from proxy.process.role import Role
from tiers.broker.client import BrokerClient, wall_clock_ms
from tiers.fitness import Fitness
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.metrics import CACHE_BYTES
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.tasks.task_services import NoLocalIndexes

logger = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The parts of the process that maintains the metadata's state and runs the RLM tasks."""

    storage: LocatedRemoteStorageManager
    metadata: RemoteLogMetadataManager
    indexes: LocalIndexes | None


async def open_owner(
    stack: AsyncExitStack,
    live: LiveSettings,
    client: BrokerClient,
    cluster_id: str | None,
    registry: CollectorRegistry,
    view: ProcessView,
) -> Owner:
    """Opens the parts; the stack closes them. Raises `RemoteTierError`, `ConfigError`."""
    config = live.config
    storage = await open_storage(stack, config, cluster_id, registry)
    fitness = Fitness(wall_clock_ms=wall_clock_ms)
    metadata = await open_metadata(stack, live, client, storage, cluster_id, fitness)
    await run_probes(stack, config, storage, fitness, registry)
    indexes = await writer_of_local_indexes(stack, config)
    if indexes is not None:
        CACHE_BYTES.metric(registry).labels("index_files").set_function(lambda: indexes.size_bytes)
    running = await run_remote_log_manager(
        stack, live, client, storage, metadata, registry, cluster_id, indexes or NoLocalIndexes()
    )
    view.opened_store(storage)
    await view.opened_tier(stack, live, client, metadata, running, fitness)
    return Owner(storage, metadata, indexes)


def _alarms(metadata: RemoteLogMetadataManager) -> list[str]:
    alarm = metadata.log.status().alarm
    return [] if alarm is None else [f"the remote log metadata: {alarm}"]


class RemoteLogProcess(Role):
    """Maintains the metadata's state that the workers share, and runs the RLM tasks."""

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry, listener: socket.socket) -> None:
        """`listener` is where the workers ask for changes of the metadata."""
        super().__init__(config, registry)
        self._listener = listener
        self.view.alarms.watch(ProcessAlarm.CERTIFICATES_UNUSABLE, partial(troubles_of, self.client.tls))
        self._metadata: RemoteLogMetadataManager | None = None

    def _has_begun(self) -> bool:
        return self._metadata is not None

    def not_ready(self) -> list[str]:
        return ["the remote tier is not open yet"] if self._metadata is None else _alarms(self._metadata)

    async def open_tier(self, stack: AsyncExitStack) -> None:
        cluster_id = await wait_for_cluster_id(self.client)
        await OwnRights(self.client, self._live, self.view.alarms).open(stack)
        owner = await open_owner(stack, self._live, self.client, cluster_id, self._registry, self.view)
        await stack.enter_async_context(MetadataChangeServer(self._listener, owner.metadata))
        self._metadata = owner.metadata

    def serve(self, stack: AsyncExitStack) -> None:
        logger.info("following the remote log metadata")

    async def drain(self) -> None:
        await super().drain()
        self._metadata = None
