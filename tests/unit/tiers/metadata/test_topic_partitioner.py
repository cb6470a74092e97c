from __future__ import annotations

from uuid import UUID

import pytest

from tiers.metadata.topic_partitioner import by_topic_id, by_topic_name, java_string_hash, murmur2
from tiers.model.ids import TopicIdPartition

_NO_ID = UUID(int=0)


def signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


@pytest.mark.parametrize(
    ("topic", "partition", "hashed", "expected"),
    [
        ("a", 0, 94660, 10),
        ("topic", 0, -1139260654, 44),
        ("__consumer_offsets", 49, 1091460411, 11),
        ("zzzzzz", 3, -1910025370, 28),
    ],
)
def test_founding_formula(topic: str, partition: int, hashed: int, expected: int) -> None:
    assert signed(java_string_hash(f"{topic}-{partition}")) == hashed
    assert by_topic_name(TopicIdPartition(_NO_ID, partition, topic), 50) == expected


def test_java_hashes_utf16_code_units() -> None:
    assert signed(java_string_hash("\N{GRINNING FACE}")) == 0xD83D * 31 + 0xDE00


@pytest.mark.parametrize(
    ("topic_id", "partition", "expected"),
    [
        ("12345678-9abc-def0-1234-56789abcdef0", 0, 11),
        ("12345678-9abc-def0-1234-56789abcdef0", 1, 2),
        ("00000000-0000-0000-0000-000000000001", 0, 35),
        ("ffffffff-ffff-ffff-ffff-ffffffffffff", 5, 0),
    ],
)
def test_kafkas_formula(topic_id: str, partition: int, expected: int) -> None:
    assert by_topic_id(TopicIdPartition(UUID(topic_id), partition), 50) == expected


@pytest.mark.parametrize(("data", "expected"), [(b"21", -973932308), (b"foobar", -790332482)])
def test_murmur2(data: bytes, expected: int) -> None:
    assert signed(murmur2(data)) == expected
