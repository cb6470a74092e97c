"""`ReadTask`: what one Spark task of a batch or a stream's trigger reads. `tasks_for` cuts a read into tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql.datasource import InputPartition

from pipeline.source.options import ReadOptions
from pipeline.source.read_plan import (
    MAX_TASKS,
    MissingOffsets,
    ReadRange,
    RemoteRange,
    packed_ranges,
    tasks_of,
    unpacked_ranges,
)
from pipeline.source.tiered_log import LogBounds, TieredLog, report_data_loss
from pipeline.spark.task_call import Version, check_version, own_version
from tiers.model.ids import TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused


class ReadTask(InputPartition):
    """The ranges of one task. It is pickled, so it is small. `cluster_id` is the one in the store's object keys."""

    def __init__(self, cluster_id: str, ranges: tuple[ReadRange, ...]) -> None:
        super().__init__(None)
        self.cluster_id = cluster_id
        self.ranges = ranges

    def __reduce__(self) -> tuple[Callable[..., ReadTask], tuple[object, ...]]:
        return _read_task, (own_version(), self.cluster_id, packed_ranges(self.ranges))


def _read_task(packed_by: Version, cluster_id: str, packed: bytes) -> ReadTask:
    check_version(packed_by)
    return ReadTask(cluster_id, unpacked_ranges(packed))


def tasks_for(
    options: ReadOptions,
    log: TieredLog,
    bounds: Mapping[TopicIdPartition, LogBounds],
    asked: Mapping[TopicIdPartition, tuple[int, int]],
    min_timestamp_ms: int | None = None,
) -> list[InputPartition]:
    """Plans the tasks for `asked`: the first and last offset of each partition, inclusive. A last offset below the
    first asks for nothing. Raises `DataLossError`."""
    with garbage_collection_paused():
        ranges: list[ReadRange] = []
        for partition, (first_offset, end_offset) in asked.items():
            for piece in log.ranges(partition, bounds[partition], first_offset, end_offset):
                if isinstance(piece, MissingOffsets):
                    report_data_loss(options, f"{partition}: {piece.first_offset} to {piece.end_offset} is gone")
                elif not (isinstance(piece, RemoteRange) and _is_before(piece, min_timestamp_ms)):
                    ranges.append(piece)
        tasks = tasks_of(
            ranges,
            options.split_bytes,
            options.min_partitions,
            options.max_records_per_partition,
            MAX_TASKS,
            options.parallelism,
        )
    return [ReadTask(log.cluster_id, task) for task in tasks]


def _is_before(piece: RemoteRange, min_timestamp_ms: int | None) -> bool:
    return min_timestamp_ms is not None and 0 <= piece.max_timestamp_ms < min_timestamp_ms
