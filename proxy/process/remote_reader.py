"""Composes the reader of the remote tier, and the process that reads it for all workers.

Requests to the store, received bytes, checksums and decryption take most of the CPU time of a backfill. In a process of
its own, they hold up no client of a worker. That process has less priority than the others, because it works ahead of
its clients, and the other processes wait for nothing but the CPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from proxy.process.budgets import chunk_folder
from proxy.process.live_settings import LiveSettings
from proxy.process.local_indexes import local_indexes_of_reader
from proxy.process.remote_log import metadata_folder, open_storage, wait_for_cluster_id
from proxy.process.role import Role
from proxy.process.tracing import open_tracer
from tiers.access.open_tier import open_key_ring
from tiers.broker.client import monotonic_ms
from tiers.metadata.metadata_log import FreshMetadata
from tiers.metadata.shared_metadata import SharedMetadata
from tiers.metric_spec import GaugeSpec
from tiers.quota import RemoteFetchQuotas
from tiers.reader.chunk_cache import DiskChunkCache, Extent
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.metrics import RemoteLogReaderMetrics
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.reader.remote_reads import TracedStore
from tiers.reader.shared.channel import SharedBuffers
from tiers.reader.shared.lent_reads import RemoteReadServer
from tiers.storage.locations import LocatedRemoteStorageManager

SHARED_BYTES = GaugeSpec(
    "tidegate_remote_reader_shared_bytes",
    "The memory that the remote reader shares with the workers.",
    since="in the remote reader",
)
REMOTE_READER: Final = "remote-reader"
_NICE: Final = 5


async def open_reader(
    stack: AsyncExitStack,
    live: LiveSettings,
    storage: LocatedRemoteStorageManager,
    metadata: FreshMetadata,
    registry: CollectorRegistry,
    process: str,
    local_indexes: LocalIndexes | None,
    tracer: Tracer | None,
    share: Callable[[Extent], Extent] = lambda extent: extent,
) -> RemoteLogReader:
    """Opens the reader; the stack closes it. Its quotas follow the settings that a reload changes.

    `process` is this process's name."""
    config = live.config
    reader = await stack.enter_async_context(
        RemoteLogReader(
            metadata,
            storage if tracer is None else TracedStore(storage, tracer),
            RemoteLogReaderSettings(config.remote_log),
            ciphers=open_key_ring(config),
            local_indexes=local_indexes,
            disk_chunks=_disk_chunks(config, process),
            share=share,
        )
    )
    live.follow(stack, partial(change_fetch_quotas, reader.quotas))
    registry.register(RemoteLogReaderMetrics(reader))
    return reader


def open_shared_metadata(stack: AsyncExitStack, config: TidegateConfig) -> SharedMetadata:
    """Opens the state that the remote-log process maintains; the stack closes it."""
    shared = SharedMetadata(metadata_folder(config))
    stack.callback(shared.close)
    return shared


class RemoteReaderProcess(Role):
    """Reads the remote tier for the workers, which ask at `listener`."""

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry, listener: socket.socket) -> None:
        super().__init__(config, registry)
        self._listener = listener
        self._server: RemoteReadServer | None = None

    def _has_begun(self) -> bool:
        return self._server is not None

    def not_ready(self) -> list[str]:
        return ["the store is not open yet"] if self._server is None else []

    async def open(self, stack: AsyncExitStack) -> None:
        os.nice(_NICE)
        await super().open(stack)

    async def open_tier(self, stack: AsyncExitStack) -> None:
        config, registry = self._live.config, self._registry
        tracer = open_tracer(stack, config)
        storage = await open_storage(stack, config, await wait_for_cluster_id(self.client), registry)
        metadata = open_shared_metadata(stack, config)
        buffers = SharedBuffers()
        storage.use_memory(buffers.memory_for)
        SHARED_BYTES.metric(registry).set_function(lambda: buffers.size_bytes)
        indexes = local_indexes_of_reader(config, REMOTE_READER)
        reader = await open_reader(
            stack, self._live, storage, metadata, registry, REMOTE_READER, indexes, tracer, buffers.share
        )
        self.view.opened_store(storage)
        self.view.opened_reader(reader)
        server = RemoteReadServer(self._listener, reader, buffers, metadata.state.reopen_if_replaced)
        self._server = await stack.enter_async_context(server)

    def serve(self, stack: AsyncExitStack) -> None:
        """Does nothing more: the workers have reached the process since `open_tier`."""


def change_fetch_quotas(quotas: RemoteFetchQuotas, config: TidegateConfig) -> None:
    remote_log = config.remote_log
    quotas.change(
        remote_log.fetch_quota_window,
        remote_log.fetch_max_bytes_per_second,
        config.limits.remote_fetch_max_bytes_per_second,
        [(topic.pattern, topic.fetch_max_bytes_per_second) for topic in config.topics],
    )


def _disk_chunks(config: TidegateConfig, process: str) -> DiskChunkCache | None:
    max_bytes = config.remote_log.chunk_file_cache_bytes
    if not max_bytes:
        return None
    return DiskChunkCache(chunk_folder(config, process), max_bytes, monotonic_ms)
