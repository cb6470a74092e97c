"""The relation of segments has a row for every segment, also with extreme timestamps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from pipeline.config import parse_pipeline_config
from pipeline.source import segments_relation
from pipeline.source.options import OptionError, Subscription
from pipeline.source.segments_relation import SegmentsDataSource, SegmentsReader
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.model.ids import TopicIdPartition

ORDERS = TopicIdPartition(TOPIC_ID, 0, "orders")
MINIMAL = '[upstream]\nbootstrap.servers = "localhost:1"\n'
Rows = Callable[[Subscription | None], list[Any]]


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


@pytest.fixture
def rows_of(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> Rows:
    @asynccontextmanager
    async def opened(config: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(state=tier.state, cluster=SimpleNamespace(topics_by_id={}))

    monkeypatch.setattr(segments_relation, "open_tier", opened)
    config = parse_pipeline_config(MINIMAL)
    return lambda subscription: list(SegmentsReader(config, subscription).read(InputPartition(None)))


async def test_times_that_no_python_has_end_no_query(tier: RemoteTier, rows_of: Rows) -> None:
    in_microseconds = 1_700_000_000_000_000
    for first, time_ms in enumerate([1_700_000_000_123, in_microseconds, 2**63 - 1]):
        await tier.add(ORDERS, [batch_of(first, 1, timestamp=time_ms)], first)
    last = datetime(9999, 12, 30, tzinfo=UTC)
    assert [row[9] for row in rows_of(None)] == [datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC), last, last]


async def test_topics_that_the_tier_lacks_are_refused(tier: RemoteTier, rows_of: Rows) -> None:
    await tier.add(ORDERS, [batch_of(0, 1)], 0)
    for right in (Subscription(pattern="ord.*"), Subscription(topics=("orders",))):
        assert len(rows_of(right)) == 1
    for wrong in (Subscription(pattern="ordrs"), Subscription(topics=("orders", "ordrs"))):
        with pytest.raises(OptionError, match=r"no topic in the remote tier matches 'ordrs'; did you mean orders\?"):
            rows_of(wrong)


def test_topics_are_chosen_as_for_records(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text(MINIMAL)
    for options, message in (
        ({"subscribePattern": "["}, "is not a regular expression"),
        ({"subscribe": "a", "subscribePattern": "b"}, "Only one of these"),
        ({"subscrib": "a"}, "did you mean subscribe"),
    ):
        with pytest.raises(OptionError, match=message):
            SegmentsDataSource({"config": str(file), **options}).reader(StructType())
