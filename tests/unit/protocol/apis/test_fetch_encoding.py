from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer import FetchResponse as KafkaPythonFetchResponse

from protocol.apis.fetch.encoding import (
    encode_partition,
    encode_response,
)
from protocol.apis.fetch.response import AbortedTransaction, EpochEndOffset, parse_fetch_response
from protocol.header import response_body_position
from protocol.schema import compile_message

FETCH = 1
TOPIC_ID = UUID("12345678-9abc-def0-1234-56789abcdef0")
VERSIONS = range(4, 19)

aborted_lists = st.none() | st.lists(
    st.builds(AbortedTransaction, st.integers(0, 2**40), st.integers(0, 2**40)), max_size=200
)


def topic_of(version: int) -> str | UUID:
    return TOPIC_ID if version >= 13 else "orders"


@given(st.sampled_from(VERSIONS), aborted_lists, st.lists(st.binary(max_size=100), max_size=3), st.booleans())
def test_an_entry_for_remote_data(
    version: int, aborted: list[AbortedTransaction] | None, records: list[bytes], diverges: bool
) -> None:
    diverging = EpochEndOffset(3, 70) if diverges and version >= 12 else None
    entry = encode_partition(
        version,
        7,
        high_watermark=100,
        last_stable_offset=90,
        log_start_offset=5,
        aborted_transactions=aborted,
        records=records,
        diverging_epoch=diverging,
    )
    payload = b"".join(encode_response(version, 31, [(topic_of(version), [entry])], throttle_time_ms=2, session_id=8))
    position = response_body_position(FETCH, version, payload)
    assert payload[:4] == b"\x00\x00\x00\x1f"
    assert compile_message(FETCH, version, "Response").skip(payload, position) == len(payload)

    ours = parse_fetch_response(payload, position, version)
    (partition,) = ours.partitions
    assert ours.throttle_time_ms == 2
    assert ours.session_id == (8 if version >= 7 else 0)
    assert (partition.topic, partition.partition, partition.error_code) == (topic_of(version), 7, 0)
    assert (partition.high_watermark, partition.last_stable_offset) == (100, 90)
    assert partition.log_start_offset == (5 if version >= 5 else -1)
    assert ours.aborted_transactions(partition) == (None if aborted is None else tuple(aborted))
    assert ours.records(partition) == b"".join(records)
    assert ours.diverging_epoch(partition) == diverging

    theirs = KafkaPythonFetchResponse.decode(payload[position:], version=version).responses[0].partitions[0]
    assert theirs.records == b"".join(records)
    assert theirs.preferred_read_replica == -1
    assert (theirs.aborted_transactions is None) == (aborted is None)


def test_records_are_handed_on_uncopied() -> None:
    records = [memoryview(b"first batch"), memoryview(b"second batch")]
    entry = encode_partition(12, 0, records=records)
    assert entry[1] is records[0]
    assert entry[2] is records[1]


def test_a_diverging_epoch_needs_version_12() -> None:
    with pytest.raises(ValueError, match="version 11"):
        encode_partition(11, 0, diverging_epoch=EpochEndOffset(1, 2))


def test_a_topic_is_named_as_its_version_wants_it() -> None:
    with pytest.raises(ValueError, match="version 12"):
        encode_response(12, 0, [(TOPIC_ID, [])])
    with pytest.raises(ValueError, match="version 13"):
        encode_response(13, 0, [("orders", [])])
