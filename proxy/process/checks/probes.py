"""The probes of a process that runs the RLM tasks: it writes its folders, and uses the store."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from tiers.errors import RemoteResourceNotFoundError
from tiers.fitness import STORE_PROBE, UNFIT, Fitness, Probe
from tiers.storage.activity import BlockingCalls
from tiers.storage.remote_storage_manager import RemoteStorageManager

_BYTES = b"tidegate probes whether it can write here" * 100
_STORE_FAILURES = 3
"""A store may refuse a request now and then, which is no reason to move partitions."""


def state_folders(config: TidegateConfig) -> dict[str, Path]:
    """Returns the folders that an owner writes."""
    return {"state folder": config.state.path / "metadata", "spool folder": config.state.path / "spool"}


async def run_probes(
    stack: AsyncExitStack,
    config: TidegateConfig,
    storage: RemoteStorageManager,
    fitness: Fitness,
    registry: CollectorRegistry,
) -> None:
    """Probes until the stack closes."""
    UNFIT.metric(registry).set_function(lambda: not fitness.is_fit)
    # Threads of its own for each folder: a disk that hangs holds up no probe of another one.
    for name, folder in state_folders(config).items():
        fitness.add(Probe(name, _writes(stack, folder)))
    fitness.add(Probe(STORE_PROBE, _uses(storage, config.state.path), _STORE_FAILURES))
    tasks = asyncio.TaskGroup()
    await tasks.__aenter__()
    stack.push_async_callback(tasks.__aexit__, None, None, None)
    stack.callback(tasks.create_task(fitness.run(), name="fitness").cancel)


def _writes(stack: AsyncExitStack, folder: Path) -> Callable[[], Awaitable[None]]:
    calls = BlockingCalls("disk-probe", 1)
    stack.callback(calls.close)
    return lambda: calls.run(lambda _: write_probe(folder / ".probe"), None)  # `Fitness` has the deadline


def write_probe(path: Path) -> None:
    """Writes a file, and removes it. Creates the folder. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            file.write(_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _uses(storage: RemoteStorageManager, folder: Path) -> Callable[[], Awaitable[None]]:
    # The same key after a restart: a process that was killed leaves one object, which its successor deletes.
    key = f".check-{uuid5(NAMESPACE_URL, f'{socket.gethostname()}:{folder.absolute()}')}"

    async def use() -> None:
        await storage.put_object(key, _BYTES)
        with suppress(RemoteResourceNotFoundError):  # the store may show an object late
            await storage.get_object(key)
        await storage.delete_object(key)

    return use
