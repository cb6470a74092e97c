"""`tidegate check` looks for the newest segments of a few partitions, and says one line if the store lacks some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from proxy.commands.store_check import absent_segments
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.segment_metadata import segment
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentState


async def lines_of(folder: Path, partition_count: int) -> list[str]:
    config = parse_config(f"""
[upstream]
bootstrap.servers = "a:1"
[storage]
implementation = "local"
path = "{folder}"
""")
    partitions = [TopicIdPartition(UUID(int=1), number, "orders") for number in range(partition_count)]

    def segments(partition: TopicIdPartition) -> list[object]:
        return [replace(segment(partition, 0, 9), state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED)]

    metadata = SimpleNamespace(partitions=lambda: partitions, list_remote_log_segments=segments)
    return await absent_segments(config, "cluster", cast(Any, metadata))


async def test_one_line_names_the_sample_the_cause_and_what_to_do(tmp_path: Path) -> None:
    [line] = await lines_of(tmp_path, partition_count=5)
    sample = "orders-0, orders-1, orders-2, in a sample of 3"
    assert line.startswith(f"the store lacks the newest segment of {sample}. Most often [storage] names another place")
    assert line.endswith("If the place is right, run `tidegate tier verify`, which finds all lost segments")


async def test_a_tier_without_segments_lacks_none(tmp_path: Path) -> None:
    assert await lines_of(tmp_path, partition_count=0) == []
