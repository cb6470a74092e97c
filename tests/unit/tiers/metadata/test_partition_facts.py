"""The facts of a partition: their bytes, and what several of them say together."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataPosition
from tiers.metadata.partition_facts import (
    PartitionFacts,
    decode_partition_facts,
    encode_partition_facts,
    joined,
    newest_of,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut

PARTITION = TopicIdPartition(UUID(int=7), 3, "orders")
TOPIC = UUID(int=9)
FACTS = PartitionFacts(
    "cluster",
    PARTITION,
    (LogStart(5, 1, LogStartReason.USER, 0),),
    OffsetAndEpoch(4, 1),
    (LogGap(10, 20),),
    (Cut(1, 30, 1_700_000_000_000, False),),
    (UUID(int=1),),
    (MetadataPosition(TOPIC, 0, 2),),
    {"local.retention.ms": "5"},
    MetadataPosition(TOPIC, 3, 17),
    MetadataPosition(TOPIC, 2, 11),
)


def at(offset: int, leader_epoch: int = 3, topic_id: UUID = TOPIC) -> PartitionFacts:
    return PartitionFacts("cluster", PARTITION, position=MetadataPosition(topic_id, leader_epoch, offset))


def test_facts_to_the_byte() -> None:
    topic = "00000000-0000-0000-0000-000000000009"
    body = (
        '{"cluster_id":"cluster","topic_id_partition":{"topic_id":"00000000-0000-0000-0000-000000000007","partition":3,'
        '"topic":"orders"},"log_starts":[{"offset":5,"leader_epoch":1,"reason":0,"last_epoch":0}],'
        '"local_log_start":[4,1],"gaps":[[10,20]],"cuts":[[1,30,1700000000000,false]],'
        f'"dead":["00000000-0000-0000-0000-000000000001"],"accepted":[["{topic}",0,2]],'
        f'"tier_config":{{"local.retention.ms":"5"}},"position":["{topic}",3,17],"settings_position":["{topic}",2,11]}}'
    )
    head, _, found = encode_partition_facts(FACTS).partition(b"\n")
    assert (head[:8], found.decode()) == (b"facts 1 ", body)
    decoded = decode_partition_facts(encode_partition_facts(FACTS))
    assert (decoded, decoded.topic_id_partition.topic) == (FACTS, "orders")


@given(st.integers(0, len(encode_partition_facts(FACTS)) * 8 - 1))
def test_other_bytes_are_no_facts(flipped_bit: int) -> None:
    whole = encode_partition_facts(FACTS)
    damaged = bytearray(whole)
    damaged[flipped_bit // 8] ^= 1 << flipped_bit % 8
    for data in (bytes(damaged), b"", b"facts 1", b"facts 2 00000000\n{}", whole[:-1]):
        with pytest.raises(RemoteLogMetadataError):
            decode_partition_facts(data)


def test_the_newest_facts_have_the_highest_position_of_the_topic() -> None:
    older, newer, other = at(99, leader_epoch=2), at(5), at(500, leader_epoch=9, topic_id=UUID(int=4))
    assert newest_of([newer, older, other], TOPIC) is newer
    assert newest_of([newer, older, other]) is other
    assert newest_of([replace(FACTS, position=None)]) is None
    changed = replace(newer, settings_position=MetadataPosition(TOPIC, 2, 12))
    for facts in ([newer, changed], [changed, newer]):
        assert newest_of(facts, TOPIC) is changed


def test_facts_are_joined_and_none_is_lost() -> None:
    lower, higher = LogStart(3, 1, LogStartReason.USER), LogStart(9, 1, LogStartReason.RETENTION)
    later = replace(
        at(20),
        log_starts=(lower, LogStart(2, 4, LogStartReason.USER)),
        gaps=(LogGap(1, 2),),
        cuts=(Cut(1, 30, 5, True), Cut(2, 7, 5)),
        dead=(UUID(int=2),),
    )
    found = joined([later, replace(FACTS, log_starts=(higher,), position=None)], None)
    assert (found.position, found.tier_config, found.local_log_start) == (later.position, {}, None)
    assert [(start.leader_epoch, start.offset) for start in found.log_starts] == [(1, 9), (4, 2)]
    assert found.gaps == (LogGap(1, 2), LogGap(10, 20))
    assert [(cut.leader_epoch, cut.offset, cut.is_proved) for cut in found.cuts] == [(1, 30, True), (2, 7, True)]
    assert (found.dead, found.accepted) == ((UUID(int=1), UUID(int=2)), FACTS.accepted)


def test_later_facts_of_one_topic_contain_earlier_ones() -> None:
    """A fact that they lack has ended since."""
    later = replace(at(20), accepted=FACTS.accepted)
    assert later.contains(FACTS)
    assert not FACTS.contains(later)
    assert not at(20).contains(FACTS), "it lacks an accepted position"
    assert not replace(later, position=None).contains(FACTS)
    other = at(500, topic_id=UUID(int=4))
    assert not other.contains(FACTS)
    assert replace(FACTS.content, position=other.position).contains(FACTS)
