"""Starts the processes of a proxy, and serves the admin pages that cover all of them.

The workers share the listening ports. With a remote tier, two processes run beside them: the remote-log process
maintains the metadata's state that the others share, and the remote reader reads the store for the workers. These two
end last, because a draining worker may still need them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import IO

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from proxy.admin.facts import ProcessState
from proxy.admin.sampling import sampled
from proxy.cluster.broker_listeners import BOOTSTRAP_PORT
from proxy.config import TidegateConfig, load_config
from proxy.logging_setup import set_level
from proxy.process.admin.access import admin_access
from proxy.process.admin.child_pages import ChildPages
from proxy.process.admin.facts_of_all import REMOTE_LOG, SUPERVISOR, FactsOfAll, OwnAlarms
from proxy.process.admin.http import admin_pages
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms, troubles_of
from proxy.process.admin.process_state import STATE_LINE, metrics_of_the_dead
from proxy.process.admin.recent_events import RecentEvents
from proxy.process.budgets import remove_other_chunk_folders
from proxy.process.child import Duty, Inherited, Task, end_timeout_ms
from proxy.process.fork_server import ForkServer
from proxy.process.live_settings import Reload, hold_reloads, take_reloads
from proxy.process.remote_log import metadata_folder
from proxy.process.remote_reader import REMOTE_READER
from proxy.process.start.end_signals import is_asked_to_end, set_by_end_signals
from proxy.process.start.port_claims import make_claims
from proxy.process.start.service_manager import ServiceManager
from proxy.process.supervisor import Child, ChildTask, Supervisor
from proxy.version import installed_version
from proxy.wire.server import bind, monotonic_ms, named_in_errors
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import wall_clock_ms
from tiers.errors import RemoteLogMetadataError
from tiers.event_loop import EventLoop
from tiers.metadata.state.writer import forget_freshness
from tiers.metric_spec import CounterSpec, GaugeSpec
from tiers.reader.shared.channel import listen

logger = logging.getLogger(__name__)

PROCESS_UP = GaugeSpec("tidegate_process_up", "1: the process runs. 0: it does not.", ("process",))
PROCESS_RESTARTS = CounterSpec(
    "tidegate_process_restarts", "Times that the process died and was restarted.", ("process",)
)

_PORT_FREE_WITHIN_MS = 3_000
"""How long the port may stay taken while the state is free. A process that has only the port is a foreign program, not
the rest of a proxy that died."""


def serve_processes(config: TidegateConfig, file: Path, forks: ForkServer) -> bool:
    """Runs all processes until SIGTERM or SIGINT, and returns whether all of them started and ended well.

    SIGHUP lets all of them read the settings in `file` again.

    Raises `RemoteTierError`, and `OSError` if a port cannot be bound."""
    if not _begin_alone(config):
        logger.info("stopped")
        return True
    remove_other_chunk_folders(config, [REMOTE_READER])
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(_serve(config, file, forks))


def _begin_alone(config: TidegateConfig) -> bool:
    """Waits for the children of a supervisor that died a moment ago. They end by themselves, within `end_timeout_ms`.

    Returns False if a signal asks for the end before that.

    If another process holds the metadata's state, it is one of those children, or it belongs to a second proxy that was
    started by mistake."""
    began_at_ms = monotonic_ms()
    state_free_by_ms, port_free_by_ms = began_at_ms + end_timeout_ms(config), began_at_ms + _PORT_FREE_WITHIN_MS
    is_said = False
    while True:
        now_ms = monotonic_ms()
        try:
            if config.is_tiered:
                forget_freshness(metadata_folder(config))
            for listener in config.listener:
                # Workers bind with SO_REUSEPORT. Without this check they would share the port with a second proxy that
                # was started by mistake, and clients would reach both.
                with named_in_errors(BOOTSTRAP_PORT):
                    bind(listener.host, listener.bootstrap_port, reuse_port=False, listens=False).close()
            return True
        except RemoteLogMetadataError as error:
            if now_ms >= state_free_by_ms:
                raise RemoteTierError(str(error)) from error
            if not is_said:
                wait_s = (state_free_by_ms - now_ms) // 1000
                logger.warning("an earlier proxy may still be ending: waiting up to %d s: %s", wait_s, error)
                is_said = True
            port_free_by_ms = now_ms + _PORT_FREE_WITHIN_MS
        except OSError:
            if now_ms >= port_free_by_ms:
                raise
        if is_asked_to_end():
            return False
        time.sleep(0.1)


async def _serve(config: TidegateConfig, file: Path, forks: ForkServer) -> bool:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.enter_context(set_by_end_signals(stop))
        stack.enter_context(forks)
        listeners = {name: stack.enter_context(_listener()) for name in _names(config)} if config.admin.port else {}
        claims = stack.enter_context(make_claims())
        reads, changes = (stack.enter_context(listen()) for _ in range(2)) if config.is_tiered else (None, None)
        token = secrets.token_urlsafe()
        stages_of = partial(_stages, file, listeners, claims, reads, changes, token)
        supervisor = Supervisor(stages_of(config), forks, stop_timeout_ms=end_timeout_ms(config))

        manager = ServiceManager(os.environ, lambda: time.monotonic_ns() // 1000)
        facts: FactsOfAll | None = None
        own = OwnAlarms(ProcessAlarms(), RecentEvents())
        stack.enter_context(own.events.attached())

        def load() -> TidegateConfig:
            with manager.reloading():
                return load_config(file)

        def apply(changed: TidegateConfig) -> None:
            set_level(changed.log.level)
            supervisor.stop_timeout_ms = end_timeout_ms(changed)
            if facts is not None:
                facts.change(changed)
            tasks = {each.name: each.task for stage in stages_of(changed) for each in stage}
            for child in supervisor.children:
                child.change_task(tasks[child.name])

        reload = Reload(config, load, apply)
        own.alarms.watch(ProcessAlarm.SETTINGS_NOT_RELOADED, partial(troubles_of, reload))
        loop.add_signal_handler(signal.SIGHUP, reload)
        stack.callback(loop.remove_signal_handler, signal.SIGHUP)
        stack.callback(hold_reloads)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}))
        ports = {name: int(listener.getsockname()[1]) for name, listener in listeners.items()}
        children = ChildPages(ports, session)
        pages = WholePages(supervisor, children, own.alarms)
        if config.admin.port:
            facts = FactsOfAll(config, supervisor, children, tuple(os.environ), own, wall_clock_ms)
            await stack.enter_async_context(sampled(facts.sample))
            at, access = (config.admin.host, config.admin.port), admin_access(config.admin)
            for alarm, troubles in access.troubles.items():
                own.alarms.watch(alarm, troubles)
            await stack.enter_async_context(admin_pages(at, pages, facts, access, installed_version(), reload))
        take_reloads()
        logger.info("starting the workers", extra={"workers": config.worker_count})
        async with asyncio.TaskGroup() as group:
            reports = group.create_task(manager.run(pages.not_ready, stop))
            is_well = await supervisor.run(stop)
            reports.cancel()
    for reason in dict.fromkeys(child.reason for child in supervisor.children if child.is_unusable):
        sys.stderr.write(f"tidegate: {reason}\n")  # several children may have the same
    logger.info("all processes ended")
    return is_well


def _names(config: TidegateConfig) -> Iterator[str]:
    yield from (f"worker-{number}" for number in range(1, config.worker_count + 1))
    if config.is_tiered:
        yield REMOTE_LOG
        yield REMOTE_READER


def _listener() -> socket.socket:
    """Returns a listener on the loopback address for one child's admin pages. It survives the child's restarts."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def _stages(
    file: Path,
    listeners: Mapping[str, socket.socket],
    claims: IO[bytes],
    reads: socket.socket | None,
    changes: socket.socket | None,
    admin_token: str,
    config: TidegateConfig,
) -> list[list[ChildTask]]:
    """`reads` is the listener at which the workers ask the remote reader, and `changes` that of the remote-log process.

    They survive the restarts of these processes."""

    def child(name: str) -> ChildTask:
        duty = {REMOTE_LOG: Duty.REMOTE_LOG, REMOTE_READER: Duty.REMOTE_READER}.get(name, Duty.WORKER)
        inherited: dict[Inherited, int] = {}
        if name in listeners:
            inherited[Inherited.ADMIN] = listeners[name].fileno()
        if duty is Duty.WORKER:
            inherited[Inherited.PORTS] = claims.fileno()
        if reads is not None and duty is Duty.REMOTE_READER:
            inherited[Inherited.READS] = reads.fileno()
        if changes is not None and duty is Duty.REMOTE_LOG:
            inherited[Inherited.CHANGES] = changes.fileno()
        reads_address, changes_address = (b"" if each is None else each.getsockname() for each in (reads, changes))
        task = Task(config, name, duty, tuple(inherited), admin_token, reads_address, changes_address, file)
        return ChildTask(name, task.to_bytes(), tuple(inherited.values()))

    names = list(_names(config))
    return [
        [child(name) for name in names[: config.worker_count]],
        [child(name) for name in names[config.worker_count :]],
    ]


class WholePages:
    """Implements `AdminPages` for all processes."""

    def __init__(self, supervisor: Supervisor, children: ChildPages, alarms: ProcessAlarms) -> None:
        """`alarms` are those of the supervisor's process."""
        self._supervisor = supervisor
        self._ask = children.ask
        self._own = CollectorRegistry()
        self._own.register(alarms)
        self._registry = CollectorRegistry()
        self._registry.register(_Processes(supervisor))

    async def not_serving(self) -> list[str]:
        """Returns no reason if one worker serves: the kernel gives new connections to the workers that accept them."""
        workers = [each for each in self._supervisor.children if each.name not in (REMOTE_LOG, REMOTE_READER)]
        return await self._reasons("/servez", workers, one_is_enough=True)

    async def not_ready(self) -> list[str]:
        return await self._reasons("/readyz", self._supervisor.children)

    async def _reasons(self, path: str, children: Sequence[Child], *, one_is_enough: bool = False) -> list[str]:
        if self._supervisor.is_stopping:
            return [f"{STATE_LINE}{ProcessState.DRAINING}", "stopping"]
        answers = await asyncio.gather(*(self._ask(child, path) for child in children))
        if one_is_enough and any(status == 200 for status, _ in answers):
            return []
        return [
            f"{child.name}: {line}"
            for child, (status, text) in zip(children, answers, strict=True)
            if status != 200
            for line in (*([f"{STATE_LINE}{ProcessState.FAILED}"] if child.process is None else []), *text.splitlines())
        ]

    async def metrics(self) -> bytes:
        children = self._supervisor.children
        answers = await asyncio.gather(*(self._ask(child, "/metrics") for child in children))
        dead = metrics_of_the_dead()
        texts = {
            child.name: text if status == 200 else dead
            for child, (status, text) in zip(children, answers, strict=True)
            if status == 200 or child.process is None
        }
        own = {SUPERVISOR: generate_latest(self._own).decode()}
        return generate_latest(self._registry) + merge_metrics(own | texts)


class _Processes(Collector):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        up, restarts = PROCESS_UP.family(), PROCESS_RESTARTS.family()
        for child in self._supervisor.children:
            up.add_metric([child.name], float(child.process is not None))
            restarts.add_metric([child.name], child.restarts)
        yield up
        yield restarts


def merge_metrics(texts: Mapping[str, str]) -> bytes:
    """Merges the metrics of several processes into one text. Every series gets the label `process`."""
    families: dict[str, Metric] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "process": process}) for sample in family.samples
            ]

    class Merged(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from families.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry)
