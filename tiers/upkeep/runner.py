"""`Runner`: runs the tasks of a job. A job is a plan of rows, a task for one row, and a step that joins the results.

`HereRunner` runs them in this process. `tidegate-pipeline` has a runner for processes and one for Spark.

The plan comes from the metadata, and the caller alone writes. So a job does the same wherever its tasks run.
Rows never contain record bytes. A task reports a failure that concerns only its own segment in its result. A task that
raises ends the whole run, so it raises only for failures that would hit every other row as well, such as a missing
permission or an unreachable store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager

P = TypeVar("P")
R = TypeVar("R")
Task = Callable[[P], Coroutine[Any, Any, R]]


class JobError(Exception):
    """The run failed. The message is one line for the user."""


class Runner(Protocol):
    @property
    def parallelism(self) -> int:
        """The number of tasks that run at the same time."""

    @property
    def is_speculative(self) -> bool:
        """Whether two attempts of a task may run at the same time."""

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        """Runs `task` for each row of `plan` and returns the results in the plan's order.

        Rows and results may be pickled. When the call ends, also by an error or a cancellation, no task runs any
        more: the caller gives up its ownership then. Raises `JobError`."""


class HereRunner:
    """Runs one task after the other on this event loop."""

    parallelism = 1
    is_speculative = False

    def __init__(self, progress: Progress = SILENCE) -> None:
        self._progress = progress

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        with self._progress.bar(what, len(plan)) as advance:
            return await bounded_gather(plan, task, self.parallelism, lambda: advance(1))


class JobStore(Protocol):
    """The store and its keys, as a task reaches them where it runs. `cluster_id` is the one in object keys."""

    @property
    def cluster_id(self) -> str: ...

    async def opened(self) -> RemoteStorageManager:
        """Returns the open store. Raises `RemoteTierError`, `RemoteLogError`."""

    def key_ring(self) -> KeyRing: ...


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store that the caller has opened, for `HereRunner`."""

    storage: RemoteStorageManager
    cluster_id: str
    ring: KeyRing

    async def opened(self) -> RemoteStorageManager:
        return self.storage

    def key_ring(self) -> KeyRing:
        return self.ring
