"""`TaskCall`: a function that is sent to the executors, with the rules that hold for every task.

* Only executors of the driver's version unpack a task: plans are tuples and bytes whose layout any release may change.
  The version comes first in the pickle and is compared before anything after it is read.
* Later garbage collections leave out the objects that the first task of a process has loaded
  (`freeze_loaded_objects`).
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

from tiers.metadata.state.layout import SCHEMA_VERSION

P = TypeVar("P")
R = TypeVar("R")

Version = tuple[str, int]

_frozen_pid = 0


class TaskCall(Generic[P, R]):
    def __init__(self, task: Callable[[P], R]) -> None:
        self._task = task

    def __call__(self, row: P) -> R:
        try:
            return self._task(row)
        finally:
            freeze_loaded_objects()

    def __reduce__(self) -> tuple[Callable[..., TaskCall[P, R]], tuple[object, ...]]:
        return _unpacked, (own_version(), cloudpickle.dumps(self._task))  # type: ignore[no-untyped-call]  # it has no types


def _unpacked(packed_by: Version, packed: bytes) -> TaskCall[P, R]:
    check_version(packed_by)
    return TaskCall(pickle.loads(packed))  # trusted: the driver made it for its own executors


@cache
def own_version() -> Version:
    """Returns Tidegate's version and the schema version of the state bytes in a plan. The schema version changes more
    often than the version during development."""
    return version("tidegate"), SCHEMA_VERSION


def check_version(packed_by: Version) -> None:
    """Raises `RuntimeError` if a driver of another version packed the task, since its bytes would be misread."""
    if packed_by != own_version():
        theirs, ours = (" ".join(map(str, each)) for each in (packed_by, own_version()))
        raise RuntimeError(
            f"the driver runs Tidegate {theirs}, this executor {ours} (version and schema): install one version on both"
        )


def freeze_loaded_objects() -> None:
    """Excludes the objects that the process has loaded by the end of its first task from later garbage collections.

    Spark collects garbage after every task, which takes a tenth of a second with libraries of this size."""
    global _frozen_pid  # one per process, because Spark forks its Python processes
    if _frozen_pid != os.getpid():
        _frozen_pid = os.getpid()
        gc.collect()
        gc.freeze()
