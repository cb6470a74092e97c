"""Merged answers keep the order, the byte limits and the first batch of every request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.request import FetchPartition
from protocol.apis.fetch.response import AbortedTransaction, FetchResponse, find_tag, parse_fetch_response
from protocol.header import response_body_position
from protocol.primitives import Buffer
from proxy.cluster.local_log_bounds import Watermarks
from proxy.handlers.fetch.merge import LocalReplacement, RemoteOutcome, merge, split_max_bytes
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.fetch_frames import reference
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.reader.remote_log_reader import RemoteRead


@dataclass(frozen=True)
class Partition:
    """`batches` are the records at the offset asked for, in whichever tier."""

    is_remote: bool
    batches: tuple[int, ...]
    max_bytes: int


partitions = st.lists(
    st.builds(
        Partition,
        is_remote=st.booleans(),
        batches=st.lists(st.integers(1, 400), max_size=4).map(tuple),
        max_bytes=st.integers(0, 900),
    ),
    min_size=1,
    max_size=6,
)


def log_of(partition: Partition) -> LocalLog:
    return LocalLog([batch_of(n, 1, value_bytes=size) for n, size in enumerate(partition.batches)])


def parse(version: int, payload: bytes) -> FetchResponse:
    return parse_fetch_response(payload, response_body_position(ApiKey.FETCH, version, payload), version)


def remote_read(log: LocalLog, max_bytes: int, min_one: bool) -> RemoteRead:
    data = log.read(0, max_bytes, min_one)
    return RemoteRead([memoryview(data)] if data else [], len(data), 0, 0, None)


@settings(max_examples=100)
@given(asked=partitions, max_bytes=st.integers(1, 1500), version=st.integers(4, 18))
def test_a_merged_answer_keeps_order_budgets_and_min_one(asked: list[Partition], max_bytes: int, version: int) -> None:
    topic = reference(version, "orders", TOPIC_ID)
    requested = [FetchPartition(topic, n, -1, 0, -1, one.max_bytes, 0, 0) for n, one in enumerate(asked)]
    remote = [n for n, one in enumerate(asked) if one.is_remote]
    budgets = split_max_bytes(requested, remote, max_bytes)

    # The broker, as Kafka does it, with what is left of MaxBytes.
    left = max(1, max_bytes - sum(budget.max_bytes for budget in budgets.values()))
    min_one = True
    entries = []
    for n, one in enumerate(asked):
        data = b""
        if not one.is_remote:
            data = log_of(one).read(0, min(one.max_bytes, left), min_one)
            left = max(0, left - len(data))
            min_one = min_one and not data
        error_code = 1 if one.is_remote else 0
        entries.append(encode_partition(version, n, error_code=error_code, records=(data,)))
    broker = parse(version, b"".join(encode_response(version, 7, [(topic, entries)], session_id=5)))

    outcomes = {
        n: RemoteOutcome(
            watermarks=Watermarks(900, 800),
            log_start_offset=3,
            read=remote_read(log_of(asked[n]), *budgets[n]),
        )
        for n in remote
    }
    merged = parse(
        version,
        b"".join(
            merge(
                broker,
                outcomes,
                max_bytes=max_bytes,
                is_read_committed=False,
                local={},
                log_start_offsets={},
                session_id=0,
            )
        ),
    )

    sizes = [entry.records_bytes for entry in merged.partitions]
    assert [entry.partition for entry in merged.partitions] == list(range(len(asked)))
    assert [entry.error_code for entry in merged.partitions] == [0] * len(asked)
    assert merged.session_id == 0
    for n, one in enumerate(asked):
        whole = b"".join(log_of(one).batches)
        data = bytes(merged.records(merged.partitions[n]))
        assert whole.startswith(data)
        assert len(data) in {sum(map(len, log_of(one).batches[:count])) for count in range(len(one.batches) + 1)}
        if not one.is_remote:
            given = bytes(broker.records(broker.partitions[n]))
            assert data == given or (not data and sum(sizes[:n]) + len(given) > max_bytes)
    # As from one broker: only the first batch of the first partition may exceed the limit, and it comes alone.
    if sum(sizes) > max_bytes:
        (overshoot,) = (n for n, size in enumerate(sizes) if size)
        assert sizes[overshoot] == len(log_of(asked[overshoot]).batches[0])
    # The first partition with records returns some, so no partition starves.
    first = asked[0]
    if first.batches:
        assert sizes[0] > 0


@pytest.mark.parametrize("version", [4, 12, 18])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_local_entry_that_does_not_fit_only_loses_its_records(version: int, is_replaced: bool) -> None:
    """Unknown tags, aborted transactions and the rest stay; a later answer that does not fit counts as not come."""
    topic = reference(version, "orders", TOPIC_ID)
    aborted = (AbortedTransaction(9, 3),)
    remote = encode_partition(version, 0, error_code=1)

    def local(size: int) -> list[Buffer]:
        entry = encode_partition(
            version,
            1,
            high_watermark=50,
            last_stable_offset=40,
            log_start_offset=20,
            aborted_transactions=aborted,
            records=(bytes(size),),
        )
        return [*entry[:-1], b"\x01\x63\x02ab"] if version >= 12 else entry

    answer = parse(
        version,
        b"".join(encode_response(version, 7, [(topic, [remote, local(0 if is_replaced else 300)])], session_id=0)),
    )
    merged = parse(
        version,
        b"".join(
            merge(
                answer,
                {0: RemoteOutcome(read=remote_read(LocalLog([batch_of(0, 1)]), 1, min_one=True))},
                max_bytes=100,
                is_read_committed=True,
                local={1: LocalReplacement(local(300), 300)} if is_replaced else {},
                log_start_offsets={1: 5},
                session_id=0,
            )
        ),
    )
    entry = merged.partitions[1]
    assert (entry.records_bytes, entry.high_watermark, entry.last_stable_offset) == (0, 50, 40)
    assert entry.log_start_offset == (5 if version >= 5 else -1)
    assert merged.aborted_transactions(entry) == aborted
    if version >= 12:
        assert find_tag(merged.payload, entry.records_end, 0x63) is not None


def test_reservations_follow_the_request_and_never_exceed_it() -> None:
    asked = [FetchPartition("t", n, -1, 0, -1, 100, 0, 0) for n in range(4)]
    assert {n: tuple(b) for n, b in split_max_bytes(asked, [3, 1, 2], 250).items()} == {
        1: (100, True),
        2: (100, False),
        3: (50, False),
    }
    assert split_max_bytes(asked, [0], 0)[0] == (0, True)
