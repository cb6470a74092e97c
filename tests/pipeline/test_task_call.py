"""The packed call of a driver to its executors, and the state that a process keeps between two tasks."""

from __future__ import annotations

import gc
import pickle
from uuid import UUID

import pytest
from pyspark import cloudpickle

from pipeline.source.read_plan import LocalRange
from pipeline.source.read_task import ReadTask
from pipeline.spark import task_call
from pipeline.spark.task_call import TaskCall
from tiers.model.ids import TopicIdPartition

PARTITION = TopicIdPartition(UUID(int=7), 0, "orders")


class Unreadable:
    """An object whose class another version does not have."""

    def __call__(self, row: int) -> int:
        return row

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return int, ("no number",)


@pytest.fixture
def of_another_version(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(task_call, "own_version", lambda: ("0.0.1", 1))
    monkeypatch.setattr("pipeline.source.read_task.own_version", lambda: ("0.0.1", 1))
    return monkeypatch


@pytest.mark.parametrize(
    "packed_by_driver",
    [TaskCall(Unreadable()), ReadTask("cluster", (LocalRange(PARTITION, 0, 9),))],
    ids=["a job's task", "a read"],
)
def test_a_task_of_another_version_is_refused_before_it_is_unpacked(
    packed_by_driver: object, of_another_version: pytest.MonkeyPatch
) -> None:
    packed = cloudpickle.dumps(packed_by_driver)  # type: ignore[no-untyped-call]  # it has no types
    of_another_version.undo()
    with pytest.raises(
        RuntimeError, match=r"^the driver runs Tidegate 0\.0\.1 1, this executor .* install one version on both$"
    ):
        pickle.loads(packed)


def test_a_call_travels_with_what_it_closes_over_and_settles_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = 40
    travelled = pickle.loads(cloudpickle.dumps(TaskCall(lambda row: row + offset)))  # type: ignore[no-untyped-call]
    monkeypatch.setattr(task_call, "_frozen_pid", 0)
    frozen = gc.get_freeze_count()
    try:
        assert travelled(2) == 42
        kept = gc.get_freeze_count()
        assert kept > frozen
        more: list[list[int]] = [[] for _ in range(1000)]
        assert travelled(3) == 43
        assert gc.get_freeze_count() <= kept, "only what the first task has loaded"
        assert len(more) == 1000
    finally:
        gc.unfreeze()
