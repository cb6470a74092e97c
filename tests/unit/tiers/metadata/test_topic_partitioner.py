from __future__ import annotations

from uuid import UUID

import pytest

from tiers.metadata.metadata_log import by_topic_id
from tiers.model.ids import TopicIdPartition


@pytest.mark.parametrize(
    ("topic_id", "partition", "expected"),
    [
        ("12345678-9abc-def0-1234-56789abcdef0", 0, 11),
        ("12345678-9abc-def0-1234-56789abcdef0", 1, 2),
        ("00000000-0000-0000-0000-000000000001", 0, 35),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", 5, 0),
    ],
)
def test_the_metadata_partition_is_that_of_kafkas_formula(topic_id: str, partition: int, expected: int) -> None:
    assert by_topic_id(TopicIdPartition(UUID(topic_id), partition), 50) == expected
