"""`SimProcess`: one life of a Tidegate process, composed as the product composes it; `SimMachine`: its state and clock.

A crash ends the process at once: none of its code runs any more. The next process finds the folder as the crash left
it, or none.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import lmdb
from prometheus_client import CollectorRegistry

from proxy.cluster.broker_listeners import ListenerAddresses
from proxy.cluster.topology import Topology
from proxy.config import TidegateConfig
from proxy.process.admin.process_view import ProcessView
from proxy.process.live_settings import LiveSettings
from proxy.process.remote_log_process import open_owner
from proxy.process.remote_reader import open_reader
from proxy.process.remote_tier import ProxyParts, own_topics_of, tier_handlers
from proxy.wire.exchange import Handler
from tests.support.simulation.cluster import HOST, PORT
from tests.support.simulation.loop import VirtualLoop, current_process
from tests.support.simulation.network import Network
from tests.support.simulation.store import SimStore
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.config.topic_policy import TopicConfig
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.state.layout import STATE_FILE
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.storage.activity import BlockingCalls

_RESTART_S = 2.0
_PAGE_BYTES = 4_096
_PAGE = struct.Struct("=Q")
_TRANSACTION = struct.Struct("=Q")
_TRANSACTION_AT = 16 + 8 + 16 + 48 + 48 + 8
"""Where a meta page has the number of its transaction: behind the page's header, and the fields before it."""
Settings = Mapping[str, Any]


def forget_last_commit(path: Path) -> None:
    """Overwrites the newer one of LMDB's two meta pages, as if it had not reached the disk.

    A file that is torn before the end of these pages has no commit to forget, and stays as it is."""
    if path.stat().st_size < 2 * _PAGE_BYTES:
        return
    with path.open("r+b") as file:
        pages = [file.read(_PAGE_BYTES) for _ in range(2)]
        newer = max((0, 1), key=lambda number: _TRANSACTION.unpack_from(pages[number], _TRANSACTION_AT)[0])
        file.seek(newer * _PAGE_BYTES)
        # The older meta, with the number of its own page.
        file.write(_PAGE.pack(newer) + pages[1 - newer][_PAGE.size :])


@contextmanager
def _no_room() -> Iterator[None]:
    """Within it, no file can be written, and every file can be read, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _name_of(executor: object) -> str:
    """Returns the name of the threads that would do the work."""
    if isinstance(executor, BlockingCalls):
        return executor._name
    return (executor._thread_name_prefix or "") if isinstance(executor, ThreadPoolExecutor) else ""


class SimProcess:
    def __init__(self, machine: SimMachine, folder: Path) -> None:
        self.machine = machine
        self.name = machine.name
        self.store = machine.store
        self.folder = folder
        self.is_dead = False
        self.is_paused = False
        self.backlog: deque[Any] = deque()
        self.graveyard: list[object] = []
        self.environments: list[lmdb.Environment] = []
        self.handlers: Mapping[int, Handler] = {}
        self.live: LiveSettings | None = None
        self.topology: Topology | None = None
        self.registry = CollectorRegistry()
        self.context = copy_context()
        self.context.run(current_process.set, self)
        self.stop = asyncio.Event()
        self.release = machine.release
        self.metadata: TopicBasedMetadataLog | None = None
        self.spawned: list[asyncio.Task[Any]] = []

    @property
    def wall_offset_ms(self) -> int:
        return self.machine.wall_offset_ms

    def thread_latency_s(self) -> float:
        return self.machine.rng.random() * 0.002

    def blocking_call(self, executor: object, work: Callable[[], Any]) -> Any:
        is_full = self.machine.is_disk_full or self.machine.full_since_s is not None
        if is_full:
            name = _name_of(executor)
            if name.startswith(("spool", "disk-probe")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if "metadata-state" in name:
                raise lmdb.DiskError("mdb_txn_commit: No space left on device")
        if self.machine.is_spool_full and _name_of(executor).startswith("spool"):
            with _no_room():
                return work()
        return work()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Starts a task of this process, also when another one calls."""
        return self.machine.loop.create_task(work, context=self.context.run(copy_context))

    def reload(self) -> None:
        """Reads the settings of the machine again, when the process runs."""
        if self.live is not None:
            context = self.context.run(copy_context)
            self.machine.loop.call_soon(self.live.change, self.machine.config(self.folder), context=context)

    def handler(self, api_key: int) -> Handler | None:
        return None if self.is_dead else self.handlers.get(api_key)

    async def run(self) -> None:
        machine = self.machine
        bootstrap = [(f"{HOST}{node}", PORT) for node in (1, 2, 3)]
        config = machine.config(self.folder)
        self.live = LiveSettings(config)
        client = BrokerClient(
            bootstrap,
            client_id=self.name,
            request_timeout_ms=config.upstream.request_timeout_ms,
            connect=machine.network.connector(self.name),
        )
        addresses = ListenerAddresses("proxy", "proxy", 9092, 9100)
        self.topology = Topology(
            client,
            bootstrap,
            [(addresses, lambda host, port, endpoint: None)],
            clock_ms=monotonic_ms,
            own_topics=own_topics_of(config),
        )
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            await self.topology.wait_for_cluster()
            view = ProcessView(self.registry)
            parts = ProxyParts(self.live, client, self.topology, group.create_task, self.registry, view)
            owner = await open_owner(stack, self.live, client, self.topology.cluster_id, self.registry, view)
            log, storage, indexes = owner.metadata.log, owner.storage, owner.indexes
            reader = await open_reader(stack, self.live, storage, log, self.registry, self.name, indexes, None)
            self.handlers = tier_handlers(parts, log, owner.metadata, reader, None)
            following = group.create_task(self.topology.run())
            stack.callback(following.cancel)
            await self.stop.wait()
            self.handlers = {}


class SimMachine:
    def __init__(
        self,
        name: str,
        root: Path,
        loop: VirtualLoop,
        rng: random.Random,
        network: Network,
        store: SimStore,
        make_config: Callable[[Path], TidegateConfig],
    ) -> None:
        self.name = name
        self.loop = loop
        self.rng = rng
        self.network = network
        self.store = store
        self._make_config = make_config
        self.rules: Callable[[TopicConfig], Sequence[TopicConfig]] = lambda rule: [rule]
        """Makes the rules in the file of this machine of the only rule in the files of the others."""
        self.wall_offset_ms = 0
        self.is_disk_full = False
        self.is_spool_full = False
        """Whether the spool alone has a disk of its own, which is full."""
        self.full_since_s: float | None = None
        """Since when the disk is full, if it stays so for good."""
        self.may_lack_metadata = False
        """Whether the machine lost its state, got an older one, or had not read records before the topic lost them."""
        self.release = 1
        """The release of the next process. Release 2 knows one record type more."""
        self.process: SimProcess | None = None
        self.lives = 0
        self.ended_with: list[str] = []
        self.dead: list[SimProcess] = []
        self._root = root
        self._copies = 0
        self._is_wanted = False

    def config(self, folder: Path) -> TidegateConfig:
        config = self._make_config(folder)
        (rule,) = config.topics
        return config.model_copy(update={"topics": tuple(self.rules(rule))})

    def change_file(self, rules: Callable[[TopicConfig], Sequence[TopicConfig]]) -> None:
        """Changes the rules in the file, and lets the process read it again."""
        self.rules = rules
        if self.process is not None:
            self.process.reload()

    def start(self, *, keep_state: bool = True) -> None:
        """Starts a process, if necessary when the present one has ended."""
        self._is_wanted = True
        if self.process is not None:
            return
        folder = self._root / f"{self.name}-{self.lives}"
        before = self._root / f"{self.name}-{self.lives - 1}"
        self.lives += 1
        if keep_state and self.dead and before.exists():
            shutil.copytree(before, folder)
        else:
            folder.mkdir(parents=True)
            self.may_lack_metadata = self.may_lack_metadata or bool(self.dead)
        if self.dead:
            shutil.rmtree(before, ignore_errors=True)
        process = self.process = SimProcess(self, folder)
        life = process.spawn(self._live(process))
        process.spawned.append(life)

    async def _live(self, process: SimProcess) -> None:
        try:
            await process.run()
            reason = "stopped"
        except RemoteTierError as error:
            reason = str(error)
        except Exception as error:
            reason = repr(error)
            if not (isinstance(error, ExceptionGroup) and isinstance(error.exceptions[0], RemoteTierError)):
                self.loop.defect = self.loop.defect or error
        self.ended_with.append(reason)
        self.loop.later(0, self._bury, process)
        self.loop.later(_RESTART_S, self._start_again)

    def _start_again(self) -> None:
        if self._is_wanted:
            self.start()

    def crash(self) -> None:
        self._is_wanted = False
        if self.process is not None:
            self._bury(self.process)

    def _bury(self, process: SimProcess) -> None:
        process.is_dead = True
        for environment in process.environments:
            environment.close()
        process.environments.clear()
        process.graveyard.extend(process.backlog)
        self.dead.append(process)
        if self.process is process:
            self.process = None

    def stop(self) -> None:
        """Stops the process cleanly. It leaves the group, and closes its state."""
        self._is_wanted = False
        if self.process is not None:
            self.process.stop.set()

    @property
    def _folder(self) -> Path:
        """The folder of the last process."""
        return self._root / f"{self.name}-{self.lives - 1}"

    def damage_state(self, size: float) -> None:
        """Leaves the state as a disk may have it after a power failure: without the last commit, torn, or empty."""
        path = self._folder / "metadata" / STATE_FILE
        self.may_lack_metadata = True
        if not path.exists():
            return
        if size < 0.6:
            forget_last_commit(path)
        else:
            os.truncate(path, int(path.stat().st_size * (size - 0.6) / 0.4) if size < 0.9 else 0)

    def metadata_is_cut(self, metadata_partition: int, end: int) -> None:
        """The metadata topic lost the records from `end` on. A machine that had not read them cannot see that."""
        # A torn file must not be opened. The machine may lack metadata since it was torn.
        if not self.may_lack_metadata:
            self.may_lack_metadata = self.metadata_read_to(metadata_partition) <= end

    def metadata_read_to(self, metadata_partition: int) -> int:
        """Returns the next offset that the process reads, or that its saved state names."""
        copied = self._root / f"{self.name}-metadata"  # lmdb cannot open a file twice
        if not (self._folder / "metadata").exists():
            return 0
        shutil.copytree(self._folder / "metadata", copied)
        try:
            state = RemoteLogMetadataState(StateFiles.open_shared(copied))
        except RemoteLogMetadataNotReadyError:
            return 0
        else:
            read_to = state.reached(metadata_partition).offset
            state.close()
            return read_to
        finally:
            shutil.rmtree(copied)

    def copy_state(self) -> Path | None:
        """Returns a copy of the folder as it is now."""
        if self.process is None:
            return None
        self._copies += 1
        copied = self._root / f"{self.name}-copy-{self._copies}"
        shutil.copytree(self._folder, copied)
        return copied

    def restore_state(self, copied: Path) -> None:
        """Puts a copy in the place of the folder of the last process."""
        self.may_lack_metadata = True
        shutil.rmtree(self._folder, ignore_errors=True)
        copied.rename(self._folder)

    def pause(self) -> None:
        if self.process is not None:
            self.process.is_paused = True

    def go_on(self) -> None:
        if self.process is not None and self.process.is_paused:
            self.loop.go_on(self.process)
