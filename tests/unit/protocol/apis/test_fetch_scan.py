from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.response import AbortedTransaction, EpochEndOffset, parse_fetch_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.topic_reference import TopicReference
from protocol.primitives import Buffer
from tests.support.fakes.message_encoder import RECORDS, Message, encoded_messages

VERSIONS = range(4, 19)


def overrides(error_codes: list[int]) -> dict[str, Any]:
    return {
        "ErrorCode": st.sampled_from(error_codes),
        "[]AbortedTransactions": st.sampled_from([0, 0, 0, 1]),
        "Records": RECORDS,
    }


@st.composite
def responses(draw: st.DrawFn, error_codes: list[int]) -> tuple[int, Message]:
    version = draw(st.sampled_from(VERSIONS))
    tags = draw(st.booleans())
    return version, draw(encoded_messages("FetchResponse", version, overrides(error_codes), unknown_tags=tags))


def is_plain(tree: dict[str, Any]) -> bool:
    partitions = [p for topic in tree["Responses"] for p in topic["Partitions"]]
    return not tree.get("ErrorCode") and not any(p["ErrorCode"] or p["AbortedTransactions"] for p in partitions)


@given(responses([0, 0, 0, 0, 0, 1, 6]))
def test_topics_of_plain_responses(message: tuple[int, Message]) -> None:
    version, (body, tree) = message
    topics = plain_topics(b"head" + body, 4, version)
    if topics is not None:
        assert is_plain(tree)
        assert topics == [t.get("TopicId", t.get("Topic")) for t in tree["Responses"]]
    elif version < 12:
        assert not is_plain(tree)


@given(responses([0]), st.data())
def test_bytes_that_cannot_be_walked_are_never_plain(message: tuple[int, Message], data: st.DataObject) -> None:
    version, (body, _) = message
    assert plain_topics(body[: data.draw(st.integers(0, len(body) - 1))], 0, version) is None
    assert plain_topics(body + b"\x00", 0, version) is None
    damaged = bytearray(body)
    for position in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    if plain_topics(damaged, 0, version) is not None:
        response = parse_fetch_response(damaged, 0, version)
        assert all(p.error_code == 0 for p in response.partitions)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_thing_out_of_the_ordinary_is_enough(version: int) -> None:
    topic = UUID(int=7) if version >= 13 else "t"
    plain = encode_partition(version, 0, records=[bytes(500)], aborted_transactions=[])

    def scan(*entries: Sequence[Buffer], error_code: int = 0) -> list[TopicReference] | None:
        payload = b"".join(encode_response(version, 1, [(topic, entries)], error_code=error_code))
        return plain_topics(payload, 5 if version >= 12 else 4, version)

    assert scan(plain, plain) == [topic]
    assert scan(plain, encode_partition(version, 1, error_code=1)) is None
    assert scan(encode_partition(version, 1, error_code=6), plain) is None
    assert scan(plain, encode_partition(version, 1, aborted_transactions=[AbortedTransaction(1, 2)])) is None
    if version >= 7:
        assert scan(error_code=70) is None
    if version >= 12:
        assert scan(encode_partition(version, 1, diverging_epoch=EpochEndOffset(1, 2)), plain) is None
