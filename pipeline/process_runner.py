"""`ProcessRunner`: runs the tasks of a job in processes of this machine, one for each core.

Each process has a socket pair of its own, and no other process holds its end. So when a process ends, the wait for its
result ends too. The messages are pickles. A thread for each running task sends and receives them. It reads a large
result piece by piece, so that the event loop runs meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from typing import Final, TypeVar

from pipeline.spark.scratch import LOCAL_DIRS, scratch_folder
from pipeline.worker import worker
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.errors import TRY_AGAIN, RetriableRemoteStorageError
from tiers.upkeep.runner import JobError, Task

P = TypeVar("P")
R = TypeVar("R")

_OURS: Final = {signal.SIGINT, signal.SIGTERM}
"""Signals that this process alone handles, also if they are sent to the group of processes."""
_CUT_OFF: Final = (EOFError, OSError, pickle.UnpicklingError)
"""The errors of sending and receiving after the other end is gone."""
_END_S: Final = 5.0
"""How long a process that closed its socket may take to end by itself."""


class ProcessRunner:
    """A context manager. A process starts when a task needs one, and ends with the block, or when this process ends.

    The processes live on between runs, so that a store is opened once. A run that ends early kills those of its tasks.
    They share a folder for scratch files, which is removed after they have ended."""

    is_speculative = False

    def __init__(self, progress: Progress = SILENCE) -> None:
        self.parallelism = os.cpu_count() or 1
        self._progress = progress
        self._threads = ThreadPoolExecutor(self.parallelism, "tidegate-process")
        self._processes: set[_TaskProcess] = set()
        self._idle: list[_TaskProcess] = []
        self._scratch = ExitStack()
        self._folder = ""

    def __enter__(self) -> ProcessRunner:
        self._folder = str(self._scratch.enter_context(scratch_folder("job")))
        return self

    def __exit__(self, *_: object) -> None:
        left = list(self._processes)
        for process in left:
            process.kill()
        for process in left:
            process.join()
        self._threads.shutdown()
        self._scratch.close()

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        loop = asyncio.get_running_loop()
        done = 0

        async def one(row: P) -> R:
            process = self._free_process()
            try:
                result: R = await loop.run_in_executor(self._threads, process.run, task, row)
            except BaseException:
                process.kill()
                await loop.run_in_executor(self._threads, process.join)
                self._processes.discard(process)
                raise
            self._idle.append(process)
            return result

        def ended() -> None:
            nonlocal done
            done += 1
            advance(1)
            if done * 10 // len(plan) > (done - 1) * 10 // len(plan):
                self._progress.milestone(f"{what}: {done} of {len(plan)} tasks")

        with self._progress.bar(what, len(plan)) as advance:
            try:
                return await bounded_gather(plan, one, self.parallelism, ended)
            except JobError as error:
                raise JobError(f"{what}: {error}") from error

    def _free_process(self) -> _TaskProcess:
        """Returns an idle process, or a new one. Forgets those that were killed while they were idle."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            process.join()
            self._processes.discard(process)
        process = _TaskProcess(self._folder)
        self._processes.add(process)
        return process


class _TaskProcess:
    """A process that runs one task after the other."""

    def __init__(self, scratch: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = self._socket.makefile("rb")
        self._process = multiprocessing.get_context("spawn").Process(target=_run_tasks, args=(theirs, scratch))
        self.is_alive, self.kill = self._process.is_alive, self._process.kill
        resource_tracker.ensure_running()  # `start` would do it, and unblock the signals
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)  # the process inherits it
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            theirs.close()

    def run(self, task: Task[P, R], row: P) -> R:
        """Blocks until the task has ended. Raises `JobError`."""
        try:
            # The process can read the outer pickle, also if it cannot import the task.
            self._socket.sendall(pickle.dumps(pickle.dumps((task, row))))
            result, failure = pickle.load(self._received)
        except _CUT_OFF as error:
            raise JobError(f"a process of the job {self._end()}") from error
        except Exception as error:  # a class may raise anything when it is pickled
            raise JobError(f"{type(error).__name__}: {error}") from error
        if failure is not None:
            raise JobError(failure)
        return result  # type: ignore[no-any-return]  # an R, as `_answer` sends

    def join(self) -> None:
        """Blocks until the process has ended, and nothing waits for its result any more."""
        self._process.join()
        self._received.close()
        self._socket.close()

    def _end(self) -> str:
        self._process.join(_END_S)
        code = self._process.exitcode
        is_killed = code is None or code < 0
        return "was killed: has this machine enough memory?" if is_killed else f"ended with exit code {code}"


def _run_tasks(parent: socket.socket, scratch: str) -> None:
    logging.basicConfig(level=logging.CRITICAL)  # a failure is reported by the job
    os.environ[LOCAL_DIRS] = scratch
    threading.Thread(target=_end_with_parent, name="tidegate-parent", daemon=True).start()
    received = parent.makefile("rb")
    with suppress(*_CUT_OFF):  # the parent has ended
        while True:
            parent.sendall(_answer(pickle.load(received)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(asked: bytes) -> bytes:
    """Runs a task. Returns its pickled result and None, or None and its failure."""
    try:
        task, row = pickle.loads(asked)
        return pickle.dumps((worker().run(task(row)), None))
    except Exception as error:
        advice = f": {TRY_AGAIN}" if isinstance(error, RetriableRemoteStorageError) else ""
        return pickle.dumps((None, f"{type(error).__name__}: {error}{advice}"))
