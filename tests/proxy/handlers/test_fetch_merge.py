"""Merged answers: order, budgets and min-one-message, whatever was asked and whatever came."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.api_keys import ApiKey
from protocol.apis.fetch_encoding import encode_partition, encode_response
from protocol.apis.fetch_request import FetchPartition
from protocol.apis.fetch_response import FetchResponse, parse_fetch_response
from protocol.header import response_body_position
from proxy.handlers.fetch_merge import RemoteOutcome, merge, reserve
from proxy.local_log_bounds import Watermarks
from tests.fakes.broker.cluster import LocalLog
from tests.fakes.broker.fetch_frames import reference
from tests.fakes.record_batches import batch_of
from tests.fakes.remote_tier import TOPIC_ID
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


@settings(max_examples=300)
@given(asked=partitions, max_bytes=st.integers(1, 1500), version=st.integers(4, 18))
def test_a_merged_answer_keeps_order_budgets_and_min_one(asked: list[Partition], max_bytes: int, version: int) -> None:
    topic = reference(version, "orders", TOPIC_ID)
    requested = [FetchPartition(topic, n, -1, 0, -1, one.max_bytes, 0, 0) for n, one in enumerate(asked)]
    remote = [n for n, one in enumerate(asked) if one.is_remote]
    budgets = reserve(requested, remote, max_bytes)

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
            max_bytes=budgets[n].max_bytes,
        )
        for n in remote
    }
    merged = parse(
        version,
        b"".join(
            merge(
                broker,
                outcomes,
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
            assert data == bytes(broker.records(broker.partitions[n]))
    # What exceeds a limit is one first batch per tier, and of the remote tier only ahead of everybody else.
    overshoots = [n for n in remote if sizes[n] > budgets[n].max_bytes]
    assert overshoots == [] or overshoots == remote[:1]
    for n in overshoots:
        assert sizes[n] == len(log_of(asked[n]).batches[0])
        assert not any(sizes[:n])
    largest = max((len(batch) for one in asked for batch in log_of(one).batches), default=0)
    assert sum(sizes) <= max_bytes + 2 * largest
    # The first partition of the request that has anything brings something: nobody starves for ever.
    first = asked[0]
    if first.batches:
        assert sizes[0] > 0


def test_reservations_follow_the_request_and_never_exceed_it() -> None:
    asked = [FetchPartition("t", n, -1, 0, -1, 100, 0, 0) for n in range(4)]
    assert {n: tuple(b) for n, b in reserve(asked, [3, 1, 2], 250).items()} == {
        1: (100, True),
        2: (100, False),
        3: (50, False),
    }
    assert reserve(asked, [0], 0)[0] == (0, True)
