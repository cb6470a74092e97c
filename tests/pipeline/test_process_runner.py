"""Tasks in processes of this machine: their results, their errors, and their end."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.process_runner import ProcessRunner
from pipeline.worker import on_thread
from tests.support.pipeline.process_tasks import (
    ended,
    endless,
    killed,
    killed_while_sending,
    one_more,
    refused,
    refused_beside_scratch,
    squared,
    unreadable,
)
from tests.support.rigs.waiting import until
from tests.support.tiers.recorded_progress import RecordedProgress
from tiers.upkeep.runner import JobError


@pytest.fixture(scope="module")
def told() -> RecordedProgress:
    return RecordedProgress()


@pytest.fixture(scope="module")
def runner(told: RecordedProgress) -> Iterator[ProcessRunner]:
    with ProcessRunner(told) as made:
        made.parallelism = 2
        yield made


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def test_results_come_in_the_order_of_the_plan(runner: ProcessRunner, told: RecordedProgress) -> None:
    results = await runner.run("squaring", range(9), squared)
    assert [number for number, _ in results] == [0, 1, 4, 9, 16, 25, 36, 49, 64]
    assert os.getpid() not in {pid for _, pid in results}
    assert await runner.run("squaring", [], squared) == []
    assert (told.milestones[-1], sum(told.advances)) == ("squaring: 9 of 9 tasks", 9)
    assert await runner.run("adding", range(3), partial(on_thread, one_more)) == [1, 2, 3]


async def test_an_error_of_a_task_is_one_line_and_the_next_run_works(runner: ProcessRunner) -> None:
    with pytest.raises(JobError) as failed:
        await runner.run("reading", [7, 8, 9], refused)
    assert str(failed.value).startswith("reading: PermissionError: no right to read segment ")
    assert [number for number, _ in await runner.run("squaring", [3], squared)] == [9]


async def test_a_process_that_is_killed_ends_the_run(runner: ProcessRunner) -> None:
    with pytest.raises(JobError, match="merging: a process of the job was killed"):
        await runner.run("merging", range(5), killed)


async def test_a_process_that_is_killed_while_it_sends_ends_the_run(runner: ProcessRunner) -> None:
    with pytest.raises(JobError, match="listing: a process of the job was killed"):
        await runner.run("listing", [64 << 20], killed_while_sending)


async def test_a_process_that_ends_by_itself_ends_the_run(runner: ProcessRunner) -> None:
    with pytest.raises(JobError, match="listing: a process of the job ended with exit code 7"):
        await runner.run("listing", [7], ended)


async def test_what_cannot_be_read_at_the_other_end_is_named(
    runner: ProcessRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="listing: ModuleNotFoundError: No module named 'no_such_module'"):
        await runner.run("listing", [1], unreadable)
    only_here = ModuleType("only_here")
    exec("async def task(row): pass", only_here.__dict__)  # a task of a module that is no file
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with pytest.raises(JobError, match="listing: ModuleNotFoundError: No module named 'only_here'"):
        await runner.run("listing", [bytes(4 << 20)], only_here.task)


async def test_a_process_that_is_killed_while_idle_is_replaced() -> None:
    others = set(multiprocessing.active_children())
    with ProcessRunner() as runner:
        runner.parallelism = 2
        for _ in range(2):
            pids = {pid for _, pid in await runner.run("squaring", range(2), squared)}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: others.issuperset(multiprocessing.active_children()))


async def test_a_run_that_fails_says_nothing_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch, began = tmp_path / "scratch", str(tmp_path / "began")
    scratch.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(scratch))
    with ProcessRunner() as runner:
        runner.parallelism = 2
        with pytest.raises(JobError, match="copying: PermissionError: no right to write"):
            await runner.run("copying", [(began, False), (began, True)], refused_beside_scratch)
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
    assert list(scratch.iterdir()) == []


async def test_no_task_runs_when_an_interrupted_run_has_returned(runner: ProcessRunner, tmp_path: Path) -> None:
    began = [tmp_path / "one", tmp_path / "other"]
    running = asyncio.create_task(runner.run("waiting", [*map(str, began), *map(str, began)], endless))
    await asyncio.to_thread(until, lambda: all(each.exists() and each.read_text() for each in began))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [is_running(int(each.read_text())) for each in began] == [False, False]


PROGRAM = """
import asyncio, sys
from pathlib import Path
from pipeline import __main__, cli
from pipeline.process_runner import ProcessRunner
from pipeline.worker import on_thread, worker
from tests.support.pipeline.process_tasks import endless

if __name__ == "__main__":
    @cli.app.command()
    def wait(began: str) -> None:
        with ProcessRunner() as runner:
            runner.parallelism = 1
            asyncio.run(runner.run("waiting", [began], endless))

    __main__.main()
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_job_and_say_nothing(sent: signal.Signals, tmp_path: Path) -> None:
    program, began = tmp_path / "program.py", tmp_path / "began"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, program, "wait", began],
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as job:
        until(lambda: began.exists() and bool(began.read_text()))
        if sent is signal.SIGKILL:
            job.kill()
        else:
            os.killpg(job.pid, sent)  # as a terminal and a service manager do
        said, _ = job.communicate(timeout=300)
    assert said == b"" or sent is signal.SIGKILL  # then the library cleans up, and says so
    assert job.returncode == (-signal.SIGKILL if sent is signal.SIGKILL else 130)
    until(lambda: not is_running(int(began.read_text())))
