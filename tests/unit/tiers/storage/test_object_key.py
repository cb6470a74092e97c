from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.segments import PARTITION
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import (
    FactsKey,
    SegmentObjectKey,
    check_cluster_id,
    facts_key,
    indexes_key,
    log_key,
    marked_cluster,
    marker_key,
    parse_facts_key,
    parse_segment_key,
    segment_of_key,
)

UUID_ONE = UUID("00000000-0000-4000-8000-000000000001")
FOLDER = "b4b5/MkU3OEVBNTcwNTJENDM2Qg/6a1d9b2e-4c3f-4e58-9f70-1b2c3d4e5f60/3/"


def metadata(partition: TopicIdPartition, segment: UUID, base: int, end: int) -> RemoteLogSegmentMetadata:
    key = SegmentObjectKey("c", partition.topic_id, partition.partition, base, end, segment, ".log")
    return segment_of_key(key, b"there")


def test_keys_to_the_letter() -> None:
    segment = metadata(PARTITION, UUID_ONE, 1000, 1999)
    stem = FOLDER + "00000000000000001000-00000000000000001999-00000000-0000-4000-8000-000000000001"
    assert log_key("MkU3OEVBNTcwNTJENDM2Qg", segment) == stem + ".log"
    assert indexes_key("MkU3OEVBNTcwNTJENDM2Qg", segment) == stem + ".indexes"
    facts = facts_key("MkU3OEVBNTcwNTJENDM2Qg", PARTITION, 3, 17, UUID_ONE)
    assert facts == FOLDER + "f0000000003-00000000000000000017-00000000-0000-4000-8000-000000000001.facts"
    assert facts > stem
    assert marker_key("MkU3OEVBNTcwNTJENDM2Qg") == "MkU3OEVBNTcwNTJENDM2Qg/tier.json"


CLUSTERS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True)
OFFSETS = st.integers(0, 2**63 - 1)


@given(CLUSTERS, st.uuids(), st.integers(0, 2**31 - 1), st.uuids(), OFFSETS, OFFSETS)
def test_keys_parse_back(cluster: str, topic: UUID, partition: int, segment: UUID, base: int, end: int) -> None:
    where = TopicIdPartition(topic, partition)
    one = metadata(where, segment, base, end)
    assert one.custom_metadata == b"there"
    for key, suffix in ((log_key(cluster, one), ".log"), (indexes_key(cluster, one), ".indexes")):
        assert parse_segment_key(key) == SegmentObjectKey(cluster, topic, partition, base, end, segment, suffix)


@given(CLUSTERS, st.uuids(), st.integers(0, 2**31 - 1))
def test_the_key_of_facts_parses_back(cluster: str, topic: UUID, partition: int) -> None:
    key = facts_key(cluster, TopicIdPartition(topic, partition), 0, 5, UUID_ONE)
    assert parse_facts_key(key) == FactsKey(cluster, topic, partition, key)
    assert parse_segment_key(key) is None
    for other in (key + "x", "x/" + key, key[1:], key.replace(".facts", ".json")):
        assert parse_facts_key(other) is None
    assert (marked_cluster(marker_key(cluster)), marked_cluster(key)) == (cluster, None)


def test_other_keys_are_not_keys_of_segments() -> None:
    key = log_key("c", metadata(PARTITION, UUID_ONE, 0, 9))
    wrong_entropy = ("0000" if key[:4] != "0000" else "0001") + key[4:]
    others = ("", key + ".tmp", "x/" + key, key.replace(".log", ".txt"), wrong_entropy, marker_key("c"))
    assert [parse_segment_key(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("cluster", ["", ".", "..", ".hidden", "a/b", "a b", "x" * 129])
def test_cluster_ids_that_cannot_be_part_of_a_key(cluster: str) -> None:
    with pytest.raises(ValueError, match="cluster id"):
        check_cluster_id(cluster)
