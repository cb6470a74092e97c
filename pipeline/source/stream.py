"""`kafka_tiered` as a stream: micro-batches over both tiers, with the rate limits and offsets of Spark's Kafka source.

Offsets have the format of Spark's Kafka source, so that a checkpoint's offsets can be given as `startingOffsets`. A
partition that appears while the query runs is read from its beginning. A topic that was deleted and recreated is also
read from its beginning, if `failOnDataLoss` does not end the query: offsets of the old topic say nothing about the new.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import UUID

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from pipeline.source.columns import columns_of
from pipeline.source.options import ReadOptions, TopicPartition, name_of
from pipeline.source.range_read import RangeReader
from pipeline.source.read_task import ReadTask, tasks_for
from pipeline.source.tiered_log import LogBounds, TieredLog, open_log, report_data_loss
from pipeline.worker import worker
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import monotonic_ms
from tiers.broker.tls import TlsError
from tiers.config.tier_config import ConfigError
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition

Offsets = dict[TopicPartition, int]


class StreamOffsets(NamedTuple):
    """The offsets in a stream's checkpoint: the JSON of Spark's own Kafka source plus the topics' ids.

    The JSON is `{"orders": {"0": next offset}, "orders@topic id": {}}`. A topic that was deleted and recreated under
    its name has another id, so none of its records were read yet. Topic names have no `@`, and readers of such JSON
    ignore a topic without partitions. So the offsets can still be given as `startingOffsets`, to Spark's Kafka source
    as well. Offsets from checkpoints of that source have no ids and apply to any topic of the name."""

    offsets: Offsets
    """The next offset to read of each partition."""
    topic_ids: Mapping[str, UUID]


def encode_offsets(of: StreamOffsets) -> dict[str, dict[str, int]]:
    encoded: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(of.offsets.items()):
        encoded.setdefault(topic, {})[str(partition)] = offset
    for topic in list(encoded):
        if topic in of.topic_ids:
            encoded[f"{topic}@{base64.urlsafe_b64encode(of.topic_ids[topic].bytes).decode().rstrip('=')}"] = {}
    return encoded


def decode_offsets(encoded: Mapping[str, Mapping[str, int]]) -> StreamOffsets:
    offsets: Offsets = {}
    topic_ids: dict[str, UUID] = {}
    for key, numbers in encoded.items():
        topic, is_id, text = key.partition("@")
        if is_id:
            topic_ids[topic] = UUID(bytes=base64.urlsafe_b64decode(text + "=="))
        else:
            offsets |= {(topic, int(partition)): offset for partition, offset in numbers.items()}
    return StreamOffsets(offsets, topic_ids)


if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
Bounds = Mapping[TopicIdPartition, LogBounds]


class TieredStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one process of the driver while the query runs, and keeps the metadata open. Executors receive a copy
    that was never opened."""

    def __init__(self, options: ReadOptions, schema: StructType, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._options = options
        self._columns = columns_of(schema)
        self._clock_ms = clock_ms
        self._open: tuple[AsyncExitStack, TieredLog] | None = None
        self._latest: StreamOffsets | None = None
        self._is_available_now = False
        self._target: StreamOffsets | None = None
        self._last_trigger_ms: int | None = None

    def initialOffset(self) -> dict[str, dict[str, int]]:
        async def ask(log: TieredLog) -> StreamOffsets:
            return _named(await log.offsets(self._options.starting, await _bounds(log)))

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
        found = self._ask(_bounds)
        latest = _named({partition: each.end for partition, each in found.items()})
        if self._is_available_now and self._target is None:
            self._target = latest
        self._latest = latest = self._target or latest
        # A new partition is read from its start.
        log_starts = {_name(partition): each.log_start for partition, each in found.items()}
        starts = {name: log_starts[name] for name in latest.offsets if name in log_starts}
        starts |= _of_topics(decode_offsets(start), latest.topic_ids)
        if not isinstance(limit, ReadAllAvailable) and self._is_too_little(starts, latest.offsets):
            return start
        if isinstance(limit, ReadMaxRows):
            latest = StreamOffsets(rate_limit(limit.max_rows, starts, latest.offsets), latest.topic_ids)
        return encode_offsets(latest)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        return None if self._latest is None else encode_offsets(self._latest)

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> Sequence[InputPartition]:
        begun, until = decode_offsets(start), decode_offsets(end)
        starts, ends = _of_topics(begun, until.topic_ids), until.offsets
        if remade := sorted({topic for topic, _ in begun.offsets.keys() - starts.keys()}):
            what = f"{', '.join(remade)}: deleted and made again under the name, after some of the old topic was read"
            report_data_loss(self._options, f"{what}; the new one is to be read from its start")

        async def plan(log: TieredLog) -> list[InputPartition]:
            bounds = await _bounds(log)
            known = {
                _name(partition): partition
                for partition in bounds
                if until.topic_ids.get(partition.topic, partition.topic_id) == partition.topic_id
            }
            gone = sorted(map(name_of, (starts.keys() - ends.keys()) | (ends.keys() - known.keys())))
            if gone:
                report_data_loss(self._options, f"{', '.join(gone)} are gone")
            asked = {
                known[name]: self._asked(name, starts, ends, bounds[known[name]]) for name in ends if name in known
            }
            return tasks_for(self._options, log, bounds, asked)

        return self._ask(plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadTask):
            return
        yield from RangeReader(self._options, partition.cluster_id).read(partition.ranges, self._columns)

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        """Does nothing: Spark's checkpoint holds the position."""

    def stop(self) -> None:
        worker().run(self._close())

    def _asked(self, name: TopicPartition, begun: Offsets, until: Offsets, bounds: LogBounds) -> tuple[int, int]:
        """Returns the first and the last offset, inclusive."""
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

    def _is_too_little(self, starts: Offsets, latest: Offsets) -> bool:
        """Returns whether to wait for more data, by `minOffsetsPerTrigger` and `maxTriggerDelay`. The first trigger
        never waits."""
        smallest = self._options.min_offsets_per_trigger
        if smallest is None or self._is_available_now:
            return False
        new = sum(end - starts.get(name, 0) for name, end in latest.items())
        now_ms, last_ms = self._clock_ms(), self._last_trigger_ms
        if new < smallest and last_ms is not None and now_ms - last_ms < self._options.max_trigger_delay_ms:
            return True
        self._last_trigger_ms = now_ms
        return False

    def _ask(self, work: Callable[[TieredLog], Awaitable[T]]) -> T:
        return worker().run(self._with_log(work))

    async def _with_log(self, work: Callable[[TieredLog], Awaitable[T]]) -> T:
        """Runs `work` on the log, which stays open between batches. If a log that was open fails, it is opened
        again."""
        was_open = self._open is not None
        try:
            return await work(await self._log())
        except (RemoteLogError, RemoteTierError, ConfigError, TlsError):
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
    """Returns end offsets with about `limit` new offsets in total, shared in proportion to the partitions' backlog.
    Each partition with a backlog gets at least one."""
    sizes = {name: end - starts[name] for name, end in latest.items() if name in starts and end > starts[name]}
    total = sum(sizes.values())
    ends = dict(latest)
    for name, size in sizes.items():
        ends[name] = min(latest[name], starts[name] + max(1, limit * size // total))
    return ends


def _named(offsets: Mapping[TopicIdPartition, int]) -> StreamOffsets:
    topic_ids = {partition.topic: partition.topic_id for partition in offsets}
    return StreamOffsets({_name(partition): offset for partition, offset in offsets.items()}, topic_ids)


def _of_topics(begun: StreamOffsets, topic_ids: Mapping[str, UUID]) -> Offsets:
    """Returns the offsets of `begun` without those of topics whose id differs from `topic_ids`."""
    return {
        (topic, partition): offset
        for (topic, partition), offset in begun.offsets.items()
        if topic not in begun.topic_ids or topic_ids.get(topic, begun.topic_ids[topic]) == begun.topic_ids[topic]
    }


def _name(partition: TopicIdPartition) -> TopicPartition:
    return partition.topic, partition.partition
