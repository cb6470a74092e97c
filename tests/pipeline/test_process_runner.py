"""Tasks in processes of this machine: their results, their errors, and their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline.process_runner import ProcessRunner
from pipeline.worker import on_thread
from tests.support.pipeline.process_tasks import endless, killed, one_more, refused, squared
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
