"""The store is listed in parts that together are all of it, or in the folders of chosen partitions."""

from __future__ import annotations

from uuid import UUID

import pytest

from tiers.model.ids import TopicIdPartition
from tiers.storage.object_key import partition_prefix
from tiers.upkeep.store_listing import EXPECTED, ExpectedPartition, listing_plan


@pytest.mark.parametrize(("segments", "listings"), [(1, 1), (200, 16), (10_000, 256)])
def test_a_large_tier_is_listed_in_parts_that_together_are_all(segments: int, listings: int) -> None:
    partitions = [TopicIdPartition(UUID(int=7), number, "orders") for number in range(60)]
    expected = [ExpectedPartition(each, bytes(EXPECTED.size * segments)) for each in partitions]
    assert len(listing_plan(expected, "c", 1, is_all=True)) == 1
    plan = listing_plan(expected, "c", 2, is_all=True)
    assert len({prefix for task in plan for prefix in task.prefixes}) == listings
    place = {one.partition: task.prefixes[0] for task in plan for one in task.expected}
    assert place.keys() == set(partitions)
    assert all(partition_prefix("c", each).startswith(prefix) for each, prefix in place.items())


def test_chosen_partitions_are_listed_alone() -> None:
    partitions = [TopicIdPartition(UUID(int=7), number, "orders") for number in range(12_000)]
    plan = listing_plan([ExpectedPartition(each, b"") for each in partitions], "c", 2, is_all=False)
    assert [len(task.prefixes) for task in plan] == [5000, 5000, 2000]
    assert [prefix for task in plan for prefix in task.prefixes] == [partition_prefix("c", each) for each in partitions]
