"""`ProcessRunner`: runs the tasks of a job in processes of this machine, one for each core."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TypeVar

from pipeline.worker import worker
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.errors import TRY_AGAIN, RetriableRemoteStorageError
from tiers.upkeep.runner import JobError, Task

P = TypeVar("P")
R = TypeVar("R")

_OURS = {signal.SIGINT, signal.SIGTERM}
"""Signals that this process alone handles, also if they are sent to the group of processes."""


class ProcessRunner:
    """A context manager. The processes start with the first task and end with the block, or when this process ends.

    They live on between runs, so that a store is opened once. A run that ends early kills them."""

    is_speculative = False

    def __init__(self, progress: Progress = SILENCE) -> None:
        self.parallelism = os.cpu_count() or 1
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        async def one(row: P) -> R:
            return await asyncio.shield(asyncio.wrap_future(self._submitted(task, row)))

        done = 0

        def ended() -> None:
            nonlocal done
            done += 1
            advance(1)
            if done * 10 // len(plan) > (done - 1) * 10 // len(plan):
                self._progress.milestone(f"{what}: {done} of {len(plan)} tasks")

        with self._progress.bar(what, len(plan)) as advance:
            try:
                return await bounded_gather(plan, one, self.parallelism + 1, ended)  # the next task waits in the pool
            except JobError as error:
                self._kill()
                raise JobError(f"{what}: {error}") from error
            except BrokenProcessPool as error:
                self._kill()
                raise JobError(f"{what}: a process of the job was killed: has this machine enough memory?") from error
            except BaseException:
                self._kill()
                raise

    def _submitted(self, task: Task[P, R], row: P) -> Future[R]:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.parallelism, spawn, _begin)
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)  # a process that starts here inherits it
        try:
            return self._pool.submit(_run, task, row)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def _kill(self) -> None:
        """Kills the processes and waits for their end."""
        if self._pool is not None:
            for process in list(self._pool._processes.values()):  # Python 3.14 has `kill_workers` for this
                process.kill()
            self._pool.shutdown()
            self._pool = None


def _begin() -> None:
    logging.basicConfig(level=logging.CRITICAL)  # a failure is reported by the job
    threading.Thread(target=_end_with_parent, name="tidegate-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(task: Task[P, R], row: P) -> R:
    try:
        return worker().run(task(row))
    except Exception as error:
        advice = f": {TRY_AGAIN}" if isinstance(error, RetriableRemoteStorageError) else ""
        raise JobError(f"{type(error).__name__}: {error}{advice}") from error
