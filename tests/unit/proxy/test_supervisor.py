"""The supervisor over small real processes, which note their events in a file."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.process.supervisor import UNUSABLE, ChildCommand, Supervisor

TIMEOUT_S = 60
NOTE = """
import os, signal, sys, time
name, path = sys.argv[1:]
def note(what):
    with open(path, "a") as file:
        file.write(f"{name} {what}\\n")
def on_sigterm(*_):
    note("ends")
    os._exit(0)  # an exception is lost where a finalizer happens to run
signal.signal(signal.SIGTERM, on_sigterm)
def stay():
    for _ in range(600):
        time.sleep(0.1)  # a signal right before a sleep is handled after it
"""
STAYS = "note('lives')\nstay()\n"
IS_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    async def noted(self, what: str, times: int = 1) -> None:
        await until(lambda: self.lines().count(what) >= times)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def child(journal: Journal, name: str, script: str, stdin: bytes = b"") -> ChildCommand:
    return ChildCommand(name, [sys.executable, "-S", "-c", NOTE + script, name, str(journal.path)], stdin)


@asynccontextmanager
async def running(*stages: list[ChildCommand], stop_timeout_ms: int = 20_000) -> AsyncIterator[Supervisor]:
    """Fails when the supervisor says that something went wrong."""
    supervisor = Supervisor(stages, stop_timeout_ms=stop_timeout_ms, jitter=lambda: 0.0)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        run = group.create_task(supervisor.run(stop))
        try:
            yield supervisor
        finally:
            stop.set()
    assert run.result()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("death", ["sys.exit(3)", "sys.exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
async def test_a_dead_child_is_started_again(journal: Journal, death: str) -> None:
    script = f"note('lives')\nif open(path).read().count('lives') < 3:\n    {death}\nstay()\n"
    async with running([child(journal, "a", script)]) as supervisor:
        await journal.noted("a lives", 3)
        assert supervisor.children[0].restarts == 2


async def test_a_process_that_dies_before_it_reads_its_input_is_started_again(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, first = asyncio.create_subprocess_exec, True

    async def seen_late(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal first
        process = await start(*arguments, **options)
        if first:
            first = False
            await process.wait()
            assert process.stdin is not None
            await until(process.stdin.is_closing)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", seen_late)
    script = f"note('begins')\nif open(path).read().count('begins') < 2:\n    sys.exit(3)\n{STAYS}"
    async with running([child(journal, "a", script, b"input")]) as supervisor:
        await journal.noted("a lives")
        assert supervisor.children[0].restarts == 1


async def test_the_others_go_on_when_one_is_killed(journal: Journal) -> None:
    async with running([child(journal, "a", STAYS), child(journal, "b", STAYS)]) as supervisor:
        await journal.noted("a lives")
        await journal.noted("b lives")
        first, second = supervisor.children
        await until(lambda: first.process is not None)  # the child notes its life before the supervisor has its handle
        assert first.process is not None
        first.process.send_signal(signal.SIGKILL)
        await journal.noted("a lives", 2)
        assert (first.restarts, second.restarts) == (1, 0)
    assert journal.lines().count("b lives") == 1


async def test_the_others_go_on_when_the_system_starts_no_process(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running([child(journal, "a", STAYS), child(journal, "b", STAYS)]) as supervisor:
        await journal.noted("a lives")
        await journal.noted("b lives")
        first, second = supervisor.children
        await until(lambda: first.process is not None)
        assert first.process is not None
        start, refusals = asyncio.create_subprocess_exec, [BlockingIOError(errno.EAGAIN, "no process left")]

        async def refused_once(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
            if refusals:
                raise refusals.pop()
            return await start(*arguments, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", refused_once)
        first.process.send_signal(signal.SIGKILL)
        await journal.noted("a lives", 2)
        assert (first.restarts, second.restarts) == (2, 0)
    assert journal.lines().count("b lives") == 1


async def test_stages_end_one_after_the_other(journal: Journal) -> None:
    async with running([child(journal, "a", STAYS), child(journal, "b", STAYS)], [child(journal, "c", STAYS)]):
        for name in "abc":
            await journal.noted(f"{name} lives")
    lines = journal.lines()
    assert sorted(lines[-3:-1]) == ["a ends", "b ends"]
    assert lines[-1] == "c ends"


async def test_a_child_that_can_never_begin_ends_them_all(journal: Journal) -> None:
    other = child(journal, "b", STAYS)
    unusable = child(
        journal, "a", f"while 'b lives' not in open(path).read(): time.sleep(0.01)\nsys.exit({UNUSABLE})\n"
    )
    supervisor = Supervisor([[unusable], [other]], stop_timeout_ms=20_000)
    async with asyncio.timeout(TIMEOUT_S):
        assert not await supervisor.run(asyncio.Event())
    assert journal.lines() == ["b lives", "b ends"]


async def test_once_it_has_begun_nothing_makes_it_unusable(journal: Journal) -> None:
    script = f"""note('lives')
lives = open(path).read().count('lives')
if lives < 3:
    sys.exit(1 if lives == 1 else {UNUSABLE})
stay()
"""
    async with running([child(journal, "a", script)]):
        await journal.noted("a lives", 3)


async def test_a_child_that_does_not_end_is_killed_and_that_is_no_good_end(journal: Journal) -> None:
    supervisor = Supervisor([[child(journal, "a", IS_DEAF)]], stop_timeout_ms=3_600_000)
    supervisor.stop_timeout_ms = 50  # a reload may change it
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        run = group.create_task(supervisor.run(stop))
        await journal.noted("a lives")
        process = supervisor.children[0].process
        assert process is not None
        stop.set()
    assert not run.result()
    assert not exists(process.pid)


async def test_nothing_is_started_again_while_everything_ends(journal: Journal) -> None:
    """Between two lives of a child, however long the next one is still to wait."""
    supervisor = Supervisor([[child(journal, "a", "note('lives')\n")]], stop_timeout_ms=20_000, jitter=lambda: 1e6)
    stop = asyncio.Event()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        run = group.create_task(supervisor.run(stop))
        await journal.noted("a lives")
        await until(lambda: supervisor.children[0].process is None)
        stop.set()
    assert run.result()
    assert journal.lines() == ["a lives"]


async def test_a_child_reads_its_input_and_continues(journal: Journal) -> None:
    script = "note(sys.stdin.buffer.read(5).decode())\n" + STAYS
    async with running([child(journal, "a", script, b"hello")]):
        await journal.noted("a hello")
        await journal.noted("a lives")


async def test_a_child_that_has_just_begun_reads_its_settings_again(journal: Journal) -> None:
    """It has no handler yet, so a signal would end it."""
    script = "note('lives')\nnote(sys.stdin.buffer.read(7).decode().replace('\\n', '+'))\n" + STAYS
    async with running([child(journal, "a", script, b"hello")]) as supervisor:
        first = supervisor.children[0]
        await until(lambda: first.process is not None)
        first.change_task(b"other")
        first.change_task(b"other")
        await journal.noted("a hello++")
        assert first.process is not None
        first.process.kill()
        await journal.noted("a lives", 3)
        first.change_task(b"third")
        first.change_task(b"third")
        await journal.noted("a other++")
    assert first.restarts == 1


async def test_a_change_during_the_start_of_a_child_is_not_lost(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def changed_meanwhile(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*arguments, **options)
        supervisor.children[0].change_task(b"other")
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", changed_meanwhile)
    script = "note(sys.stdin.buffer.read(5).decode())\n" + STAYS
    supervisor = Supervisor([[child(journal, "a", script, b"hello")]], stop_timeout_ms=20_000)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run(stop))
        await journal.noted("a other")
        stop.set()


_SUPERVISE = """
import asyncio, pickle, sys
from proxy.process.supervisor import Supervisor
commands = pickle.load(sys.stdin.buffer)
asyncio.run(Supervisor([commands], stop_timeout_ms=1000).run(asyncio.Event()))
"""


async def test_end_of_input_tells_every_child_that_it_was_left_alone(journal: Journal) -> None:
    script = "note('lives')\nsys.stdin.buffer.read()\nnote('is alone')\n"
    commands = [child(journal, name, script) for name in "ab"]
    command = [sys.executable, "-c", _SUPERVISE]
    supervisor = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    try:
        assert supervisor.stdin is not None
        supervisor.stdin.write(pickle.dumps(commands))
        for name in "ab":
            await journal.noted(f"{name} lives")
        assert not {"a is alone", "b is alone"} & set(journal.lines())
    finally:
        supervisor.kill()
        await supervisor.wait()
    for name in "ab":
        await journal.noted(f"{name} is alone")
