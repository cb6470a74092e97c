"""ShareFetch through the proxy, from a broker that leads one partition and names the leader of the other."""

from __future__ import annotations

from uuid import UUID

import pytest

from protocol.addresses import Address
from protocol.api_keys import ApiKey
from protocol.apis.fetch.share_stream import FILLER_TAGS
from protocol.primitives import INT32
from proxy.handlers.fetch.pass_through import HOLD_BYTES
from proxy.process.app import pass_through_handlers
from proxy.wire.socket_transport import LOW_WATER_BYTES
from tests.support.fakes.broker.wire import frame, request, response
from tests.support.fakes.message_encoder import UNKNOWN_TAGS, Value, encode
from tests.support.proxy.proxy_harness import relayed

BROKER_HOST = "broker.internal"
NONE, NOT_LEADER_OR_FOLLOWER = 0, 6


def advertised(node_id: int) -> Address:
    return "proxy.example", 9100 + node_id


def partition(index: int, records: bytes, error_code: int = NONE) -> Value:
    return {
        "PartitionIndex": index,
        "ErrorCode": error_code,
        "ErrorMessage": None,
        "AcknowledgeErrorCode": NONE,
        "AcknowledgeErrorMessage": None,
        "CurrentLeader": {"LeaderId": 3 if error_code else -1, "LeaderEpoch": 7 if error_code else -1},
        "Records": records,
        "AcquiredRecords": [] if error_code else [{"FirstOffset": 0, "LastOffset": 9, "DeliveryCount": 1}],
    }


def share_fetch_answer(records: bytes) -> Value:
    """Partition 0 with records, partition 1 led by broker 3."""
    return {
        "ThrottleTimeMs": 0,
        "ErrorCode": NONE,
        "ErrorMessage": None,
        "AcquisitionLockTimeoutMs": 30_000,
        "Responses": [
            {
                "TopicId": UUID(int=1),
                "Partitions": [partition(0, records), partition(1, b"", NOT_LEADER_OR_FOLLOWER)],
            }
        ],
        "NodeEndpoints": [{"NodeId": 3, "Host": BROKER_HOST, "Port": 9092, "Rack": "a"}],
    }


def payload(version: int, value: Value) -> bytes:
    return response(5, b"\x00" + bytes(encode("ShareFetchResponse", version, value).data))


@pytest.mark.parametrize("version", [1, 2])
async def test_a_small_answer_names_the_proxy_for_the_leader(version: int) -> None:
    asked = request(ApiKey.SHARE_FETCH, version, 5, b"whatever is asked")
    expected = share_fetch_answer(b"records")
    expected["NodeEndpoints"] = [{"NodeId": 3, "Host": "proxy.example", "Port": 9103, "Rack": "a"}]
    async with relayed(handlers=pass_through_handlers(), address_of=advertised) as (client, broker, _):
        await client.send(asked)
        upstream = await broker.accepted()
        assert await upstream.receive() == asked
        await upstream.send(payload(version, share_fetch_answer(b"records")))
        assert await client.receive() == payload(version, expected)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_large_answer_is_streamed_without_endpoints(version: int) -> None:
    records = b"r" * (20 * HOLD_BYTES)
    whole = payload(version, share_fetch_answer(records))
    middle = len(whole) - 2 * HOLD_BYTES
    async with relayed(handlers=pass_through_handlers(), address_of=advertised) as (client, broker, _):
        await client.send(request(ApiKey.SHARE_FETCH, version, 5))
        upstream = await broker.accepted()
        await upstream.send_raw(frame(whole)[: INT32.size + middle])
        # The first part arrives before the rest is sent, except for what the kernel waits for.
        first = middle - LOW_WATER_BYTES
        assert await client.receive_raw(INT32.size + first) == frame(whole)[: INT32.size + first]
        await upstream.send_raw(whole[middle:])
        streamed = whole[:first] + await client.receive_raw(len(whole) - first)
        await client.send(request(ApiKey.HEARTBEAT, 0, 6))
        await upstream.receive()
        await upstream.receive()
        await upstream.send(response(6))
        assert await client.receive() == response(6)

    filler = {FILLER_TAGS[0]: bytes(25)}
    assert streamed == payload(version, share_fetch_answer(records) | {"NodeEndpoints": [], UNKNOWN_TAGS: filler})
