"""A reload applies the log level, the limits, the topics and the quotas, and names what needs a restart."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from proxy.admin.facts import ProcessState
from proxy.config import TidegateConfig
from proxy.logging_setup import set_level
from proxy.process.admin.process_view import ProcessView
from proxy.process.app import run
from proxy.process.child import Duty, Task, settings_again, share_of_duty
from proxy.process.live_settings import LiveSettings, Reload, Reloaded, changed_keys, hold_reloads, take_reloads
from proxy.process.remote_reader import change_fetch_quotas
from proxy.process.role import Role
from proxy.wire.admission import Admission, Admissions, Limit
from proxy.wire.error_log import Incident
from tests.support.proxy.parsed_config import parse_config
from tiers.quota import RemoteFetchQuotas

BASE = """
[upstream]
bootstrap.servers = "a:1"
[storage]
implementation = "local"
path = "tier"
[[topics]]
name = "orders"
"""


def reloaded(before: str, after: str | Callable[[], TidegateConfig]) -> tuple[Reloaded, list[TidegateConfig]]:
    applied: list[TidegateConfig] = []
    load = (lambda: parse_config(after)) if isinstance(after, str) else after
    return Reload(parse_config(before), load, applied.append)(), applied


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ("", []),
        ('[log]\nlevel = "debug"', ["[log] level"]),
        ("[limits]\nmax.connections = 7", ["[limits] max.connections"]),
        ('[[topics]]\nname = "payments"', ["[[topics]]"]),
        ('[[listener]]\nadvertised.host = "b"', ["[[listener]]"]),
        ("[upstream.tls]", ["[upstream.tls]"]),
        ('[state]\npath = "elsewhere"', ["[state] path"]),
    ],
)
def test_the_settings_that_differ_are_named(change: str, keys: list[str]) -> None:
    assert list(changed_keys(parse_config(BASE), parse_config(BASE + change))) == keys
    assert list(changed_keys(parse_config("workers = 2\n" + BASE), parse_config(BASE))) == ["workers"]
    top = "remote.log.reader.threads = 3\n" + BASE
    assert list(changed_keys(parse_config(BASE), parse_config(top))) == ["remote.log.reader.threads"]


def test_only_some_settings_apply_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    change = "[limits]\nmax.connections = 7\nheld.messages.max.bytes = 1\n"
    after = BASE + change + '[log]\nlevel = "error"\n[state]\npath = "b"\n[[topics]]\nname = "b"'
    applied = list[TidegateConfig]()
    reload = Reload(parse_config(BASE), lambda: parse_config(after), applied.append)
    result, config, again = reload(), applied[0], reload()
    assert again.need_restart == result.need_restart
    assert result == Reloaded(
        ("[[topics]]", "[log] level", "[limits] max.connections"),
        ("[state] path", "[limits] held.messages.max.bytes"),
    )
    base = parse_config(BASE + '[[topics]]\nname = "b"')
    assert config.limits.model_fields_set - base.limits.model_fields_set == {"max_connections"}, "the source of a value"
    assert config.remote_log.model_fields_set == base.remote_log.model_fields_set
    assert config == base.model_copy(
        update={
            "limits": base.limits.model_copy(update={"max_connections": 7}),
            "log": base.log.model_copy(update={"level": "error"}),
        }
    )
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "the settings are reloaded: changed [[topics]], [log] level, [limits] max.connections"
    restart = "these changed settings need a restart: [state] path, [limits] held.messages.max.bytes"
    assert said[1::2] == [restart, restart], "it is named every time"


def test_a_topic_needs_a_restart_if_there_is_no_remote_tier() -> None:
    """The process has no store, also if the new file has one."""
    local = '[upstream]\nbootstrap.servers = "a:1"\n'
    result, (config,) = reloaded(local, BASE)
    assert result == Reloaded((), ("[storage]", "[[topics]]"))
    assert (config.topics, config.storage) == ((), None)


def test_wrong_settings_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    texts, applied = iter(("no = TOML", BASE)), list[TidegateConfig]()
    reload = Reload(parse_config(BASE), lambda: parse_config(next(texts), "f.toml"), applied.append)
    result = reload()
    assert "f.toml" in result.mistake
    assert (result.mistake in reload.trouble, applied) == (True, [])
    assert f"the settings are not reloaded, because they are wrong: {result.mistake}" in caplog.text
    reload()
    assert reload.trouble == ""


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_the_level_changes_for_all_loggers(root_level: None) -> None:
    set_level("error")
    assert not logging.getLogger("proxy.x").isEnabledFor(logging.WARNING)
    set_level("debug")
    assert logging.getLogger("proxy.x").isEnabledFor(logging.DEBUG)


async def test_a_lower_limit_of_connections_ends_none() -> None:
    ended: list[Limit] = []
    admissions = Admissions(3, 0, 0, 30_000)
    places = [admissions.admit("a", ended.append) for _ in range(3)]
    for place in places:
        assert isinstance(place, Admission)
        place.prove()
    admissions.change_limits(2, 0, 0, 1000)
    assert ended == []
    assert admissions.admit("a", ended.append) is Limit.CONNECTIONS
    admissions.change_limits(4, 0, 0, 1000)
    assert isinstance(admissions.admit("a", ended.append), Admission)


def test_the_fetch_quotas_apply_at_once() -> None:
    quotas = "remote.log.manager.fetch.max.bytes.per.second = 5\nremote.log.manager.fetch.quota.window.num = 1\n"
    copying = "remote.log.manager.copy.max.bytes.per.second = 5\n"
    others = "remote.log.manager.thread.pool.size = 3\n"
    per_client = "[limits]\nremote.fetch.max.bytes.per.second = 6\n"
    _, (config,) = reloaded(BASE, quotas + copying + others + BASE + per_client)
    assert config == parse_config(quotas + copying + BASE + per_client)
    known = RemoteFetchQuotas(lambda: 0)
    assert known.reserve("orders", "client", 1_000) is not None
    change_fetch_quotas(known, config)
    assert known.reserve("orders", "client", 1_000) is not None
    assert known.reserve("orders", "client", 1) is None
    change_fetch_quotas(known, parse_config(BASE))
    assert known.reserve("orders", "client", 1) is not None


@pytest.mark.parametrize("workers", [0, 8])
def test_a_child_keeps_its_share_until_a_restart(workers: int, tmp_path: Path) -> None:
    """The limits of a worker depend on the number of workers, which needs a restart."""
    file = tmp_path / "f.toml"
    file.write_text(f"workers = {workers}\n{BASE}[limits]\nmax.connections = 60\n")
    before = parse_config(f"workers = 2\n{BASE}")
    for duty in Duty:
        again = settings_again(Task(before, "name", duty, file=file))
        now = parse_config(f"workers = 2\n{BASE}[limits]\nmax.connections = 60\n")
        assert again == share_of_duty(now, duty)
    assert settings_again(Task(before, "name", Duty.WORKER, file=file)).limits.max_connections == 30


async def test_parts_follow_the_settings_in_effect_while_they_are_open() -> None:
    before, after = parse_config(BASE), parse_config(BASE + '[[topics]]\nname = "b"')
    live, seen = LiveSettings(before), list[tuple[str, TidegateConfig]]()
    async with AsyncExitStack() as outer:
        async with AsyncExitStack() as inner:
            live.follow(inner, lambda config: seen.append(("early", config)))
            live.change(after)
            live.follow(outer, lambda config: seen.append(("late", config)))
        assert seen == [("early", before), ("early", after), ("late", after)]
        live.change(before)
    assert seen[3:] == [("late", before)]
    live.change(after)
    assert seen[4:] == []
    assert (live.config, live.rules()) == (after, after.topics)


def send_sighup() -> None:
    """Sends it to the main thread. Threads of other tests hold nothing."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)


class SlowRole:
    """Gets SIGHUP while it opens. Its tier follows the settings from the moment at which it is open."""

    def __init__(self, config: TidegateConfig, registry: CollectorRegistry, signals_in: str) -> None:
        self.view = ProcessView(registry)
        self.serves_with_seven = asyncio.Event()
        self._serves = False
        self._connections = 0
        self._live = LiveSettings(config)
        self._signals_in = signals_in

    state = ProcessState.INITIALIZING

    def not_serving(self) -> list[str]:
        return []

    def not_ready(self) -> list[str]:
        return []

    def errors(self) -> Sequence[Incident]:
        return ()

    async def open(self, stack: AsyncExitStack) -> None:
        await self._pause("open")

    async def open_tier(self, stack: AsyncExitStack) -> None:
        await self._pause("open_tier")
        self._live.follow(stack, self._take)

    async def _pause(self, place: str) -> None:
        if place == self._signals_in:
            send_sighup()
            for _ in range(10):
                await asyncio.sleep(0)

    def serve(self, stack: AsyncExitStack) -> None:
        self._serves = True
        self._look()

    def change(self, config: TidegateConfig) -> None:
        self._live.change(config)

    def _take(self, config: TidegateConfig) -> None:
        self._connections = config.limits.max_connections
        self._look()

    def _look(self) -> None:
        if self._serves and self._connections == 7:
            self.serves_with_seven.set()

    async def drain(self) -> None:
        send_sighup()


@pytest.fixture
def ended_by() -> Iterator[list[int]]:
    """The signals that would have ended the process."""
    seen: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: seen.append(number))
    yield seen
    take_reloads()
    signal.signal(signal.SIGHUP, before)


NO_ADMIN = f"{BASE}[admin]\nport = 0\n"


@pytest.mark.parametrize("signals_in", ["open", "open_tier"])
async def test_a_reload_during_the_start_is_kept(signals_in: str, ended_by: list[int], root_level: None) -> None:
    stop, made = asyncio.Event(), asyncio.Queue[SlowRole]()

    def make(config: TidegateConfig, registry: CollectorRegistry) -> Role:
        role = SlowRole(config, registry, signals_in)
        made.put_nowait(role)
        return cast(Role, role)

    def load() -> TidegateConfig:
        return parse_config(f"{NO_ADMIN}[limits]\nmax.connections = 7\n")

    hold_reloads()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(run(parse_config(NO_ADMIN), make, stop, load=load))
        await (await made.get()).serves_with_seven.wait()
        stop.set()
    assert ended_by == []
