"""`kafka_tiered` as a stream: micro-batches over both tiers, admission and offsets as in Spark's own Kafka source.

Offsets are Spark's Kafka source's too, `{"topic": {"0": next offset}}`, so that a checkpoint's can be given as
`startingOffsets`. A partition that appears while the query runs is read from its beginning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pipeline.datasource import ReadTask, columns_of, tasks_for
from pipeline.options import ReadOptions, TopicPartition, name_of
from pipeline.range_read import RangeReader
from pipeline.tiered_log import LogBounds, TieredLog, open_log, report_data_loss
from pipeline.worker import worker
from tiers.broker.client import monotonic_ms
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.open_tier import RemoteTierError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
Offsets = dict[TopicPartition, int]
Bounds = Mapping[TopicIdPartition, LogBounds]


class TieredStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process of the driver while the query runs, with the metadata open. What executors are given is a
    copy that was never opened."""

    def __init__(self, options: ReadOptions, schema: StructType, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._options = options
        self._columns = columns_of(schema)
        self._clock_ms = clock_ms
        self._open: tuple[AsyncExitStack, TieredLog] | None = None
        self._latest: Offsets | None = None
        self._is_available_now = False
        self._target: Offsets | None = None
        self._last_trigger_ms = clock_ms()

    def initialOffset(self) -> dict[str, dict[str, int]]:
        async def ask(log: TieredLog) -> Offsets:
            bounds = await log.bounds(await log.partitions())
            starting = await log.offsets(self._options.starting, bounds)
            return {_name(partition): offset for partition, offset in starting.items()}

        return encode_offsets(self._ask(ask))

    def prepareForTriggerAvailableNow(self) -> None:
        self._is_available_now = True

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        begun = decode_offsets(start)
        bounds = {_name(partition): each for partition, each in self._ask(_bounds).items()}
        if self._is_available_now and self._target is None:
            self._target = {name: each.end for name, each in bounds.items()}
        self._latest = self._target or {name: each.end for name, each in bounds.items()}
        # A partition that is new, is read from its start.
        starts = {name: bounds[name].log_start for name in self._latest if name in bounds} | begun
        if not isinstance(limit, ReadAllAvailable) and self._is_too_little(starts):
            return start
        if isinstance(limit, ReadMaxRows):
            return encode_offsets(rate_limit(limit.max_rows, starts, self._latest))
        return encode_offsets(self._latest)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        return None if self._latest is None else encode_offsets(self._latest)

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[InputPartition]:
        begun, until = decode_offsets(start), decode_offsets(end)

        async def plan(log: TieredLog) -> list[InputPartition]:
            bounds = await _bounds(log)
            known = {_name(partition): partition for partition in bounds}
            gone = sorted(map(name_of, (begun.keys() - until.keys()) | (until.keys() - known.keys())))
            if gone:
                report_data_loss(self._options, f"{', '.join(gone)} are gone")
            asked = {
                known[name]: self._asked(name, begun, until, bounds[known[name]]) for name in until if name in known
            }
            return tasks_for(self._options, log, bounds, asked)

        return self._ask(plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            return
        yield from RangeReader(self._options, partition.cluster_id).read(partition.ranges, self._columns)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        """Spark's checkpoint says what was read."""

    def stop(self) -> None:
        worker().run(self._close())

    def _asked(self, name: TopicPartition, begun: Offsets, until: Offsets, bounds: LogBounds) -> tuple[int, int]:
        """First and last offset, inclusive."""
        first = begun.get(name)
        if first is None:
            first = bounds.log_start
            if first > 0:
                report_data_loss(self._options, f"Added partition {name_of(name)} starts from {first} instead of 0")
        end = until[name]
        if end < first or end > bounds.end:
            what = f"Partition {name_of(name)} was to be read from {first} to {end}, and ends at {bounds.end}"
            report_data_loss(self._options, what)
        return first, min(end, bounds.end) - 1

    def _is_too_little(self, starts: Offsets) -> bool:
        """Whether to wait for more, by `minOffsetsPerTrigger` and `maxTriggerDelay`."""
        smallest = self._options.min_offsets_per_trigger
        if smallest is None or self._is_available_now or self._latest is None:
            return False
        new = sum(end - starts.get(name, 0) for name, end in self._latest.items())
        if new < smallest and self._clock_ms() - self._last_trigger_ms < self._options.max_trigger_delay_ms:
            return True
        self._last_trigger_ms = self._clock_ms()
        return False

    def _ask(self, work: Callable[[TieredLog], Awaitable[T]]) -> T:
        return worker().run(self._with_log(work))

    async def _with_log(self, work: Callable[[TieredLog], Awaitable[T]]) -> T:
        """The log stays open between batches; one that fails after a while is opened anew."""
        was_open = self._open is not None
        try:
            return await work(await self._log())
        except (RemoteLogError, RemoteTierError):
            await self._close()
            if not was_open:
                raise
        return await work(await self._log())

    async def _log(self) -> TieredLog:
        if self._open is None:
            async with AsyncExitStack() as stack:
                log = await stack.enter_async_context(open_log(self._options))
                self._open = stack.pop_all(), log
        return self._open[1]

    async def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await opened[0].aclose()


async def _bounds(log: TieredLog) -> Bounds:
    return await log.bounds(await log.partitions())


def rate_limit(limit: int, starts: Offsets, latest: Offsets) -> Offsets:
    """At most about `limit` offsets, shared by how much each partition has; none is starved."""
    sizes = {name: end - starts[name] for name, end in latest.items() if name in starts and end > starts[name]}
    total = sum(sizes.values())
    ends = dict(latest)
    for name, size in sizes.items():
        ends[name] = min(latest[name], starts[name] + max(1, limit * size // total))
    return ends


def encode_offsets(offsets: Offsets) -> dict[str, dict[str, int]]:
    encoded: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        encoded.setdefault(topic, {})[str(partition)] = offset
    return encoded


def decode_offsets(encoded: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {
        (topic, int(partition)): offset for topic, numbers in encoded.items() for partition, offset in numbers.items()
    }


def _name(partition: TopicIdPartition) -> TopicPartition:
    return partition.topic, partition.partition
