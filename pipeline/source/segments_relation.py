"""The relation `kafka_tiered_segments`: one row for each segment that the remote tier's metadata knows.

Counting and sizing need no record: `select topic, sum(size_bytes) ... group by topic`. The options are `config` and, to
limit the topics, `subscribe` or `subscribePattern`. A topic that the tier lacks is an error. The relation asks no
broker for permission: every user who has the configuration file may read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pipeline.config import PipelineConfig, load_pipeline_config
from pipeline.source.options import OptionError, Subscription, subscription_option
from pipeline.worker import worker
from tiers.access.open_tier import OpenTier, location_of, open_tier
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.texts import did_you_mean

NAME = "kafka_tiered_segments"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_TIME_MS = (datetime(9999, 12, 30, tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)

SegmentRow = tuple[
    str, str, int, str, int, int, int, str, int, datetime | None, datetime | None, list[tuple[int, int]], str, bool
]


class SegmentsDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return (
            "topic STRING, topic_id STRING, partition INT, segment_id STRING, start_offset BIGINT, end_offset BIGINT, "
            "valid_end_offset BIGINT, state STRING, size_bytes BIGINT, max_timestamp TIMESTAMP, "
            "event_timestamp TIMESTAMP, leader_epochs ARRAY<STRUCT<epoch INT, start_offset BIGINT>>, location STRING, "
            "is_readable BOOLEAN"
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        path = self.options.get("config")
        if path is None:
            raise OptionError("the option config is missing: name the tier's configuration file")
        return SegmentsReader(load_pipeline_config(Path(path)), subscription_option(self.options))


class SegmentsReader(DataSourceReader):
    def __init__(self, config: PipelineConfig, subscription: Subscription | None) -> None:
        self._config = config
        self._subscription = subscription

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[SegmentRow]:
        return iter(worker().run(self._rows()))

    async def _rows(self) -> list[SegmentRow]:
        async with open_tier(self._config) as tier:
            names = {partition: _topic_name(tier, partition) for partition in tier.state.partitions()}
            shown = self._shown(set(names.values()))
            return [
                _row(tier, segment, name)
                for partition, name in names.items()
                if name in shown
                for segment in tier.state.list_remote_log_segments(partition)
            ]

    def _shown(self, known: set[str]) -> set[str]:
        """Returns the topics of the subscription. Raises `OptionError` for a topic that is not `known`, and for a
        pattern that matches none of them."""
        if self._subscription is None:
            return known
        shown = set(self._subscription.topics_among(known))
        missing = sorted(shown - known) if shown else [self._subscription.pattern]
        if missing:
            nearest = did_you_mean(missing[0], known)
            raise OptionError(f"no topic in the remote tier matches {missing[0]!r}{nearest}")
        return shown


def _topic_name(tier: OpenTier, partition: TopicIdPartition) -> str:
    """Returns the topic's current name in the cluster, or the last known name of a deleted topic."""
    topic = tier.cluster.topics_by_id.get(partition.topic_id)
    return partition.topic if topic is None else topic.name


def _row(tier: OpenTier, segment: RemoteLogSegmentMetadata, topic: str) -> SegmentRow:
    partition = segment.topic_id_partition
    found = tier.state.next_segment(partition, segment.start_offset)
    return (
        topic,
        str(partition.topic_id),
        partition.partition,
        str(segment.segment_id.id),
        segment.start_offset,
        segment.end_offset,
        segment.valid_end_offset,
        segment.state.name,
        segment.segment_size_bytes,
        _time(segment.max_timestamp_ms),
        _time(segment.event_timestamp_ms),
        [(entry.epoch, entry.start_offset) for entry in segment.segment_leader_epochs],
        location_of(segment),
        found is not None and found.segment_id == segment.segment_id,
    )


def _time(time_ms: int) -> datetime | None:
    """Clips the timestamp to the range of Python's datetime in every time zone: a producer may send any number."""
    return None if time_ms < 0 else _EPOCH + timedelta(milliseconds=min(time_ms, _LAST_TIME_MS))
