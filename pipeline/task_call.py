"""`TaskCall`: a function on its way to the executors, and what holds for every task that runs there.

* What a driver packs, only executors of the same version unpack: plans are tuples and bytes whose meaning changes with
  any release. The version comes first, and nothing behind it is looked at before it is known to be the same.
* What the first task of a process has loaded stays as long as the process does (`settle`).
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Generic, TypeVar

from pyspark import cloudpickle

from tiers.metadata.state_layout import SCHEMA_VERSION

P = TypeVar("P")
R = TypeVar("R")

Version = tuple[str, int]

_settled_pid = 0


class TaskCall(Generic[P, R]):
    def __init__(self, task: Callable[[P], R]) -> None:
        self._task = task

    def __call__(self, row: P) -> R:
        try:
            return self._task(row)
        finally:
            settle()

    def __reduce__(self) -> tuple[Callable[..., TaskCall[P, R]], tuple[object, ...]]:
        return _unpacked, (own_version(), cloudpickle.dumps(self._task))  # type: ignore[no-untyped-call]  # it has no types


def _unpacked(packed_by: Version, packed: bytes) -> TaskCall[P, R]:
    check_version(packed_by)
    return TaskCall(pickle.loads(packed))  # what a driver has made for its own executors


@cache
def own_version() -> Version:
    """Of Tidegate, and of the state whose bytes a plan has: that changes more often while one version is being made."""
    return version("tidegate"), SCHEMA_VERSION


def check_version(packed_by: Version) -> None:
    """Raises `RuntimeError` for what a driver of another version has packed: its bytes would be taken for others."""
    if packed_by != own_version():
        theirs, ours = (" ".join(map(str, each)) for each in (packed_by, own_version()))
        raise RuntimeError(
            f"the driver has Tidegate {theirs}, this executor {ours} (version and schema): give both the same"
        )


def settle() -> None:
    """What a process has loaded by the end of its first task is there for good: no later collection looks through it.

    Spark collects after every task, which is a tenth of a second with libraries as large as these."""
    global _settled_pid  # one per process, whatever Spark forks it from
    if _settled_pid != os.getpid():
        _settled_pid = os.getpid()
        gc.collect()
        gc.freeze()
