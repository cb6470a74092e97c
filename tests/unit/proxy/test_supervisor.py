"""The supervisor over small real processes, which note their events in a file."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.process.fork_server import ForkedProcess, ForkServer
from proxy.process.supervisor import UNUSABLE, ChildTask, Supervisor

TIMEOUT_S = 60
NOTE = """
import os, signal, sys, time
def note(what):
    with open(path, "a") as file:
        file.write(f"{name} {what}\\n")
def on_sigterm(*_):
    note("ends")
    os._exit(0)  # an exception is lost where a finalizer happens to run
signal.signal(signal.SIGTERM, on_sigterm)
def read(size):
    data = b""
    while len(data) < size and (more := os.read(control, size - len(data))):
        data += more
    return data.decode()
def stay():
    for _ in range(600):
        time.sleep(0.1)  # a signal right before a sleep is handled after it
"""
STAYS = "note('lives')\nstay()\n"
IS_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS
_LENGTH_BYTES = 4


def run_script(fds: Sequence[int]) -> int:
    """A child: its task is a pickled name, path and script, with the length before, and what the script reads."""
    (control,) = fds
    size_bytes = int.from_bytes(os.read(control, _LENGTH_BYTES))
    name, path, script = pickle.loads(os.read(control, size_bytes))
    try:
        exec(NOTE + script, {"name": name, "path": path, "control": control})
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


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


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    server = ForkServer(run_script)
    yield server
    server.close()
    gc.unfreeze()


@pytest.fixture
def supervisors() -> Iterator[ForkServer]:
    server = ForkServer(supervise)
    yield server
    server.close()
    gc.unfreeze()


def child(journal: Journal, name: str, script: str, read: bytes = b"") -> ChildTask:
    return ChildTask(name, task(journal, name, script, read))


def task(journal: Journal, name: str, script: str, read: bytes = b"") -> bytes:
    pickled = pickle.dumps((name, str(journal.path), script))
    return len(pickled).to_bytes(_LENGTH_BYTES) + pickled + read


@asynccontextmanager
async def running(
    forks: ForkServer, *stages: list[ChildTask], stop_timeout_ms: int = 20_000
) -> AsyncIterator[Supervisor]:
    """Fails when the supervisor says that something went wrong."""
    supervisor = Supervisor(stages, forks, stop_timeout_ms=stop_timeout_ms, jitter=lambda: 0.0)
    stop = asyncio.Event()
    with forks:
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
async def test_a_dead_child_is_started_again(journal: Journal, forks: ForkServer, death: str) -> None:
    script = f"note('lives')\nif open(path).read().count('lives') < 3:\n    {death}\nstay()\n"
    async with running(forks, [child(journal, "a", script)]) as supervisor:
        await journal.noted("a lives", 3)
        assert supervisor.children[0].restarts == 2


async def test_a_process_that_dies_before_it_reads_its_task_is_started_again(
    journal: Journal, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, first = forks.fork, True

    async def reported_late(fds: Sequence[int]) -> ForkedProcess:
        nonlocal first
        process = await fork(fds)
        if first:
            first = False
            process.send_signal(signal.SIGKILL)
            await process.wait()
        return process

    monkeypatch.setattr(forks, "fork", reported_late)
    async with running(forks, [child(journal, "a", STAYS)]) as supervisor:
        await journal.noted("a lives")
        assert supervisor.children[0].restarts == 1


async def test_the_others_go_on_when_the_system_starts_no_process(
    journal: Journal, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(forks, [child(journal, "a", STAYS), child(journal, "b", STAYS)]) as supervisor:
        await journal.noted("a lives")
        await journal.noted("b lives")
        first, second = supervisor.children
        await until(lambda: first.process is not None)
        assert first.process is not None
        fork, refusals = forks.fork, [BlockingIOError(errno.EAGAIN, "no process left")]

        async def refused_once(fds: Sequence[int]) -> ForkedProcess:
            if refusals:
                raise refusals.pop()
            return await fork(fds)

        monkeypatch.setattr(forks, "fork", refused_once)
        first.process.send_signal(signal.SIGKILL)
        await journal.noted("a lives", 2)
        assert (first.restarts, second.restarts) == (2, 0)
    assert journal.lines().count("b lives") == 1


async def test_stages_end_one_after_the_other(journal: Journal, forks: ForkServer) -> None:
    async with running(forks, [child(journal, "a", STAYS), child(journal, "b", STAYS)], [child(journal, "c", STAYS)]):
        for name in "abc":
            await journal.noted(f"{name} lives")
    lines = journal.lines()
    assert sorted(lines[-3:-1]) == ["a ends", "b ends"]
    assert lines[-1] == "c ends"


async def test_a_child_that_can_never_begin_ends_them_all(journal: Journal, forks: ForkServer) -> None:
    other = child(journal, "b", STAYS)
    unusable = child(
        journal, "a", f"while 'b lives' not in open(path).read(): time.sleep(0.01)\nsys.exit({UNUSABLE})\n"
    )
    supervisor = Supervisor([[unusable], [other]], forks, stop_timeout_ms=20_000)
    with forks:
        async with asyncio.timeout(TIMEOUT_S):
            assert not await supervisor.run(asyncio.Event())
    assert journal.lines() == ["b lives", "b ends"]


async def test_once_it_has_begun_nothing_makes_it_unusable(journal: Journal, forks: ForkServer) -> None:
    script = f"""note('lives')
lives = open(path).read().count('lives')
if lives < 3:
    sys.exit(1 if lives == 1 else {UNUSABLE})
stay()
"""
    async with running(forks, [child(journal, "a", script)]):
        await journal.noted("a lives", 3)


async def test_a_child_that_does_not_end_is_killed_and_that_is_no_good_end(journal: Journal, forks: ForkServer) -> None:
    supervisor = Supervisor([[child(journal, "a", IS_DEAF)]], forks, stop_timeout_ms=3_600_000)
    supervisor.stop_timeout_ms = 50  # a reload may change it
    stop = asyncio.Event()
    with forks:
        async with asyncio.TaskGroup() as group:
            run = group.create_task(supervisor.run(stop))
            await journal.noted("a lives")
            process = supervisor.children[0].process
            assert process is not None
            stop.set()
    assert not run.result()
    assert not exists(process.pid)


async def test_nothing_is_started_again_while_everything_ends(journal: Journal, forks: ForkServer) -> None:
    """Between two lives of a child, however long the next one is still to wait."""
    supervisor = Supervisor(
        [[child(journal, "a", "note('lives')\n")]], forks, stop_timeout_ms=20_000, jitter=lambda: 1e6
    )
    stop = asyncio.Event()
    with forks:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            run = group.create_task(supervisor.run(stop))
            await journal.noted("a lives")
            await until(lambda: supervisor.children[0].process is None)
            stop.set()
    assert run.result()
    assert journal.lines() == ["a lives"]


async def test_a_child_that_has_just_begun_reads_its_settings_again(journal: Journal, forks: ForkServer) -> None:
    """It has no handler yet, so a signal would end it."""
    script = "note('lives')\nnote(read(7).replace('\\n', '+'))\n" + STAYS
    async with running(forks, [child(journal, "a", script, b"hello")]) as supervisor:
        first = supervisor.children[0]
        await until(lambda: first.process is not None)
        first.change_task(task(journal, "a", script, b"other"))
        first.change_task(task(journal, "a", script, b"other"))
        await journal.noted("a hello++")
        assert first.process is not None
        first.process.send_signal(signal.SIGKILL)
        await journal.noted("a lives", 3)
        first.change_task(task(journal, "a", script, b"third"))
        first.change_task(task(journal, "a", script, b"third"))
        await journal.noted("a other++")
    assert first.restarts == 1


async def test_a_change_during_the_start_of_a_child_is_not_lost(
    journal: Journal, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = forks.fork
    script = "note(read(5))\n" + STAYS

    async def changed_meanwhile(fds: Sequence[int]) -> ForkedProcess:
        process = await fork(fds)
        supervisor.children[0].change_task(task(journal, "a", script, b"other"))
        return process

    monkeypatch.setattr(forks, "fork", changed_meanwhile)
    async with running(forks, [child(journal, "a", script, b"hello")]) as supervisor:
        await journal.noted("a other")


def supervise(fds: Sequence[int]) -> int:
    """A supervisor in a process of its own: its children note when it left them alone."""
    (control,) = fds
    tasks = pickle.loads(os.read(control, 1 << 16))
    forks = ForkServer(run_script)

    async def run() -> None:
        with forks:
            await Supervisor([tasks], forks, stop_timeout_ms=1000).run(asyncio.Event())

    asyncio.run(run())
    return 0


async def test_the_end_of_the_supervisor_reaches_every_child(journal: Journal, supervisors: ForkServer) -> None:
    script = "note('lives')\nread(1)\nnote('is alone')\n"
    ours, theirs = socket.socketpair()
    with ours, supervisors:
        with theirs:
            supervisor = await supervisors.fork([theirs.fileno()])
        ours.sendall(pickle.dumps([child(journal, name, script) for name in "ab"]))
        for name in "ab":
            await journal.noted(f"{name} lives")
        assert not {"a is alone", "b is alone"} & set(journal.lines())
        supervisor.send_signal(signal.SIGKILL)
        await supervisor.wait()
        for name in "ab":
            await journal.noted(f"{name} is alone")


async def test_the_loss_of_the_fork_server_ends_the_supervisor(
    journal: Journal, forks: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    script = "note('lives')\nread(1)\nnote('is alone')\n"
    with forks:
        supervisor = Supervisor([[child(journal, "a", script)]], forks, stop_timeout_ms=20_000, jitter=lambda: 0.0)
        async with asyncio.TaskGroup() as group:
            run = group.create_task(supervisor.run(asyncio.Event()))
            await journal.noted("a lives")
            os.kill(forks.pid, signal.SIGKILL)
    assert not run.result()
    assert str(forks.pid) in str(forks.loss)
    assert "a process died and is restarted" not in caplog.text
    await journal.noted("a is alone")


async def test_a_child_without_standard_output_ends_with_its_code(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of the program has closed it."""
    monkeypatch.setattr(sys, "stdout", None)
    forks = ForkServer(run_script)
    gc.unfreeze()
    ours, theirs = socket.socketpair()
    with ours, theirs, forks:
        process = await forks.fork([theirs.fileno()])
        ours.sendall(task(journal, "a", "sys.exit(5)"))
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 5
