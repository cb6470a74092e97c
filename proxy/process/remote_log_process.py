"""The process that owns: it maintains the metadata's state that the other processes share, and runs the RLM tasks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from proxy.admin.facts import ProcessState
from proxy.config import TidegateConfig
from proxy.process.admin.process_alarms import ProcessAlarm, troubles_of
from proxy.process.admin.process_state import SERVES_NO_CLIENTS
from proxy.process.admin.process_view import ProcessView
from proxy.process.checks.open_files import raise_open_files
from proxy.process.checks.own_rights import OwnRights
from proxy.process.checks.probes import process_fitness, run_probes
from proxy.process.live_settings import LiveSettings
from proxy.process.local_indexes import writer_of_local_indexes
from proxy.process.metadata_changes import MetadataChangeServer
from proxy.process.remote_log import open_metadata, open_storage, run_remote_log_manager, wait_for_cluster_id
from proxy.wire.error_log import Incident
from tiers.broker.client import BrokerClient
from tiers.config.upstream_config import broker_client
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
    fitness = process_fitness(config)
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


class RemoteLogProcess:
    """Maintains the metadata's state that the workers share, and runs the RLM tasks."""

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry, listener: socket.socket) -> None:
        """`listener` is where the workers ask for changes of the metadata."""
        self._live = LiveSettings(config)
        self._registry = registry
        self._listener = listener
        self.view = ProcessView(registry)
        self._client = broker_client(config.upstream)
        self.view.alarms.watch(ProcessAlarm.CERTIFICATES_UNUSABLE, partial(troubles_of, self._client.tls))
        self._metadata: RemoteLogMetadataManager | None = None
        self._stops = False

    @property
    def state(self) -> ProcessState:
        if self._stops:
            return ProcessState.DRAINING
        return ProcessState.INITIALIZING if self._metadata is None else ProcessState.SERVING

    def not_serving(self) -> list[str]:
        return [SERVES_NO_CLIENTS]

    def not_ready(self) -> list[str]:
        return ["the remote tier is not open yet"] if self._metadata is None else _alarms(self._metadata)

    def errors(self) -> Sequence[Incident]:
        return ()

    async def open(self, stack: AsyncExitStack) -> None:
        raise_open_files()
        stack.push_async_callback(self._client.close)

    async def open_tier(self, stack: AsyncExitStack) -> None:
        cluster_id = await wait_for_cluster_id(self._client)
        await OwnRights(self._client, self._live, self.view.alarms).open(stack)
        owner = await open_owner(stack, self._live, self._client, cluster_id, self._registry, self.view)
        await stack.enter_async_context(MetadataChangeServer(self._listener, owner.metadata))
        self._metadata = owner.metadata

    def serve(self, stack: AsyncExitStack) -> None:
        logger.info("following the remote log metadata")

    def change(self, config: TidegateConfig) -> None:
        self._live.change(config)

    async def drain(self) -> None:
        self._stops = True
        self._metadata = None
