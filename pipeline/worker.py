"""`Worker`: the event loop and the open connections that a process keeps between the tasks of a job.

The tier's code is asynchronous, while Spark and pools of processes call plain functions. One loop runs on its own
thread for the lifetime of the process. Broker clients and stores are opened once per configuration, and all tasks of
the process share them. Spark forks its Python processes, so the worker is created by the first task and never before a
fork. At the end of the process the worker closes its connections as far as the peers allow. If the process is killed,
it closes none.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.config import PipelineConfig
from tiers.access.open_tier import RemoteTierError, open_key_ring
from tiers.broker.client import BrokerClient
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig
from tiers.config.upstream_config import UpstreamConfig, broker_client
from tiers.event_loop import EventLoop
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

CLIENT_ID = "tidegate-pipeline"
_CLOSE_TIMEOUT_S = 5.0
_END = object()

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self) -> None:
        self._loop = EventLoop()
        self._lock = asyncio.Lock()
        self._clients: dict[UpstreamConfig, BrokerClient] = {}
        self._stores: list[tuple[StorageConfig, str, LocatedRemoteStorageManager]] = []
        self._closing: list[Callable[[], Awaitable[None]]] = []
        threading.Thread(target=self._loop.run_forever, name="tidegate-worker", daemon=True).start()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Runs `work` on the loop and returns its result. An exception in the waiting thread cancels `work`, and is
        raised after `work` has ended. A second one is raised at once."""

        async def end() -> None:
            if running := {each for each in asyncio.all_tasks() if each.get_coro() is work}:
                await asyncio.wait(running)

        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                asyncio.run_coroutine_threadsafe(end(), self._loop).result()
            raise

    def iterate(self, items: AsyncGenerator[T, None], ahead: int = 2) -> Generator[T, None, None]:
        """Yields the items in order and buffers up to `ahead` of them. If the caller stops early, `items` is closed."""
        queue: asyncio.Queue[object] = asyncio.Queue(ahead)

        async def fill() -> None:
            async with aclosing(items):
                async for item in items:
                    await queue.put(item)
            await queue.put(_END)

        async def next_item(filling: asyncio.Task[None]) -> object:
            getting = asyncio.ensure_future(queue.get())  # noqa: TID251  # raced against the task that fills the queue
            try:
                await asyncio.wait({getting, filling}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done() and filling.done() and queue.empty():
                    filling.result()
                return await getting
            finally:
                getting.cancel()

        async def start() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(fill())

        async def stop(filling: asyncio.Task[None]) -> None:
            filling.cancel()
            await asyncio.wait({filling})

        filling = self.run(start())
        try:
            while (item := self.run(next_item(filling))) is not _END:
                yield item  # type: ignore[misc]  # a T, as only `fill` puts
        finally:
            self.run(stop(filling))

    @contextmanager
    def hold(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Yields the value of `manager`, which is entered and left in one task on the loop. The block runs here."""
        entered: Future[T] = Future()
        left = threading.Event()
        leave = asyncio.Event()

        async def holding() -> None:
            try:
                async with manager as value:
                    entered.set_result(value)
                    await leave.wait()
            except BaseException as error:
                if entered.done():
                    raise
                entered.set_exception(error)
            finally:
                left.set()

        held = asyncio.run_coroutine_threadsafe(holding(), self._loop)
        try:
            yield entered.result()
        finally:
            if not entered.done():
                held.cancel()
            self._loop.call_soon_threadsafe(leave.set)
            left.wait()
        held.result()

    async def keep(self, storage: RemoteStorageManager) -> None:
        """Opens `storage` for the lifetime of the process. Raises what `storage.open` raises."""
        await storage.open()
        self._closing.append(storage.close)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Closes everything that was opened here, the latest first, within `timeout_s`. A client or store that fails to
        close in time is left to the end of the process."""

        async def closed() -> None:
            deadline = asyncio.get_running_loop().time() + timeout_s
            while self._closing:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._closing.pop()()
                except Exception as error:  # a store's library may raise anything; an unclosed store loses no data
                    logger.debug("not closed", extra={"error": repr(error)})

        self.run(closed())

    async def client(self, config: PipelineConfig) -> BrokerClient:
        """Returns this process's client for the cluster and identity of `config`.

        Secrets are part of the key, so that no task uses another identity's connection. Raises `TlsError`."""
        async with self._lock:
            if config.upstream not in self._clients:
                self._clients[config.upstream] = client = broker_client(config.upstream, CLIENT_ID)
                self._closing.append(client.close)
            return self._clients[config.upstream]

    async def storage(self, config: PipelineConfig, cluster_id: str) -> LocatedRemoteStorageManager:
        """Returns this process's open storage manager for `config`. Raises `RemoteTierError`, `RemoteLogError`."""
        if config.storage is None:
            raise RemoteTierError("there is no [storage]")
        async with self._lock:
            for settings, of_cluster, known in self._stores:
                if (settings, of_cluster) == (config.storage, cluster_id):
                    return known
            storage = create_storage(config.storage, cluster_id)
            await self.keep(storage)
            self._stores.append((config.storage, cluster_id, storage))
            return storage


_worker: tuple[int, Worker] | None = None
_making = threading.Lock()


def worker() -> Worker:
    """Returns the worker of this process."""
    global _worker  # one per process, because Spark forks its Python processes
    with _making:
        if _worker is None or _worker[0] != os.getpid():
            _worker = os.getpid(), Worker()
        return _worker[1]


async def on_thread(function: Callable[[P], R], row: P) -> R:
    """Runs a plain function as the task of a `Runner`. It may call `worker().run`."""
    return await asyncio.to_thread(function, row)


@dataclass(frozen=True, slots=True)
class TierStore:
    """A `JobStore` of the process in which a task runs. It may be pickled."""

    config: PipelineConfig = field(repr=False)
    cluster_id: str

    async def opened(self) -> LocatedRemoteStorageManager:
        return await worker().storage(self.config, self.cluster_id)

    def key_ring(self) -> KeyRing:
        return open_key_ring(self.config)


@atexit.register
def _close() -> None:
    if _worker is not None and _worker[0] == os.getpid():
        _worker[1].close()
