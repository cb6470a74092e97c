"""The relation `kafka_tiered_segments`: what the metadata says of the remote tier's segments, a row for each.

Counting and sizing need no record read: `select topic, sum(size_bytes) ... group by topic`. It takes the option
`config` alone, and shows every topic: it is for who holds the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pipeline.config import PipelineConfig, load_pipeline_config
from pipeline.options import OptionError
from pipeline.worker import worker
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.open_tier import OpenTier, location_of, open_tier

NAME = "kafka_tiered_segments"

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
            raise OptionError("the option config is missing: the tier's file")
        return SegmentsReader(load_pipeline_config(Path(path)))


class SegmentsReader(DataSourceReader):
    def __init__(self, config: PipelineConfig) -> None:
        self._config = config

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[SegmentRow]:
        return iter(worker().run(self._rows()))

    async def _rows(self) -> list[SegmentRow]:
        async with open_tier(self._config) as tier:
            return [
                _row(tier, segment)
                for partition in tier.metadata.partitions()
                for segment in tier.metadata.list_remote_log_segments(partition)
            ]


def _row(tier: OpenTier, segment: RemoteLogSegmentMetadata) -> SegmentRow:
    partition = segment.topic_id_partition
    found = tier.metadata.next_segment(partition, segment.start_offset)
    topic = tier.cluster.topics_by_id.get(partition.topic_id)
    return (
        partition.topic if topic is None else topic.name,
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
    return None if time_ms < 0 else datetime.fromtimestamp(time_ms / 1000, UTC)
