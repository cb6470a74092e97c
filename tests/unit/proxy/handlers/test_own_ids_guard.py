"""The owners' group and transactional ids are refused to clients; all other requests leave as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.coordinated_ids import GROUP_APIS, TRANSACTION_APIS, refusal
from protocol.errors import ErrorCode
from protocol.header import build_request_header, build_response_header
from protocol.message_schema import message_name
from protocol.primitives import INT16, write_array_length, write_string
from proxy.handlers.guards import own_ids_guards
from proxy.wire.limits import Limits
from tests.support.fakes.broker.wire import frame, response
from tests.support.fakes.message_encoder import message_names, smallest
from tests.support.proxy.virtual_network import Peer, VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

GROUP = "tidegate-__remote_log_metadata"
TRANSACTIONAL_IDS = [f"{GROUP}-0", f"{GROUP}-49", f"{GROUP}-tier-configs-3", f"{GROUP}-import-1"]
STRANGERS = ["", f"{GROUP}2", f"x{GROUP}-1"]


def request(key: ApiKey, version: int, *, transactional_id: str = "mine", group_id: str = "mine") -> bytes:
    header = build_request_header(key, version, 5, "client")
    name = message_name(key, "Request")
    if name not in message_names():
        return header + write_string(group_id, compact=True) + bytes(40)
    ids = {
        "TransactionalId": transactional_id,
        "V3AndBelowTransactionalId": transactional_id,
        "GroupId": group_id,
    }
    return header + smallest(name, version, **ids)


def proxy_of(network: VirtualNetwork, tasks: asyncio.TaskGroup) -> tuple[VirtualProxy, Peer]:
    handlers, prefix_handlers = own_ids_guards(GROUP)
    proxy = VirtualProxy(network, tasks, handlers=handlers, prefix_handlers=prefix_handlers, limits=Limits())
    return proxy, proxy.connect()


def exchange(pieces: Sequence[bytes], answer: bytes) -> tuple[bytes, bytes]:
    """Sends the pieces of one request through a proxy. Returns what the broker saw, and what the client received."""

    async def main(network: VirtualNetwork) -> tuple[bytes, bytes]:
        async with asyncio.TaskGroup() as tasks:
            _, client = proxy_of(network, tasks)
            for piece in pieces:
                client.send(piece)
                await asyncio.sleep(1)
            broker = network.brokers[0]
            if broker.received:
                broker.send(frame(answer))
            await asyncio.sleep(1)
            client.half_close()
            await asyncio.sleep(10)
        return bytes(broker.received), bytes(client.received)

    return run_virtually(main)


def uses() -> list[tuple[ApiKey, int, ErrorCode, dict[str, str]]]:
    found = []
    for key in (*TRANSACTION_APIS, *GROUP_APIS):
        for version in (DECODED_APIS[key].min_version, DECODED_APIS[key].max_version):
            if key in TRANSACTION_APIS:
                code = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                found.append((key, version, code, {"transactional_id": TRANSACTIONAL_IDS[version % 4]}))
            if key in GROUP_APIS or key in (ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT):
                found.append((key, version, ErrorCode.GROUP_AUTHORIZATION_FAILED, {"group_id": GROUP}))
    return found


@pytest.mark.parametrize(("key", "version", "code", "ids"), uses())
def test_the_owners_ids_are_refused(key: ApiKey, version: int, code: ErrorCode, ids: dict[str, str]) -> None:
    """The broker sees nothing of the request, however its bytes arrive."""
    sent = request(key, version, **ids)
    expected = frame(refusal(sent, code))
    whole = frame(sent)
    for pieces in ([whole], [whole[:20], whole[20:45], whole[45:]], [whole[:-1], whole[-1:]]):
        assert exchange(pieces, b"") == (b"", expected)


@pytest.mark.parametrize("key", [*TRANSACTION_APIS, *GROUP_APIS])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_other_ids_pass_byte_for_byte(key: ApiKey, stranger: str) -> None:
    sent = frame(request(key, DECODED_APIS[key].max_version, transactional_id=stranger, group_id=stranger))
    for pieces in ([sent], [sent[:25], sent[25:]]):
        assert exchange(pieces, response(5, b"as it is")) == (sent, frame(response(5, b"as it is")))


def test_a_producer_without_a_transactional_id_passes() -> None:
    sent = frame(build_request_header(ApiKey.INIT_PRODUCER_ID, 1, 5, None) + b"\xff\xff" + bytes(4))
    assert exchange([sent], response(5)) == (sent, frame(response(5)))


def test_a_request_that_passes_is_not_held() -> None:
    """Its bytes reach the broker before its last byte has arrived."""

    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            _, client = proxy_of(network, tasks)
            sent = frame(request(ApiKey.SYNC_GROUP, 3) + bytes(100_000))
            client.send(sent[:50_000])
            await asyncio.sleep(1)
            assert network.brokers[0].received == sent[:50_000]
            client.reset()

    run_virtually(main)


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("others", [[], ["a"], ["a", "b"]])
def test_the_owners_group_is_not_deleted_with_others(version: int, others: list[str]) -> None:
    compact = version >= 2
    end = b"\0" if compact else b""

    def deletion(groups: list[str]) -> bytes:
        names = b"".join(write_string(group, compact) for group in groups)
        head = build_request_header(ApiKey.DELETE_GROUPS, version, 5, "client")
        return frame(head + write_array_length(len(groups), compact) + names + end)

    def deleted(results: dict[str, int]) -> bytes:
        body = bytes(4) + write_array_length(len(results), compact)
        for group, code in results.items():
            body += write_string(group, compact) + INT16.pack(code) + end
        return build_response_header(ApiKey.DELETE_GROUPS, version, 5) + body + end

    seen, received = exchange([deletion([*others, GROUP])], deleted(dict.fromkeys(others, 0)))
    assert seen == deletion(others)
    assert received == frame(deleted({GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED, **dict.fromkeys(others, 0)}))
    assert exchange([deletion(others)], deleted(dict.fromkeys(others, 0)))[0] == deletion(others)


def test_the_batched_request_of_brokers_is_not_offered() -> None:
    """AddPartitionsToTxn names many transactional ids from version 4 on. A client that sends it is closed."""
    assert DECODED_APIS[ApiKey.ADD_PARTITIONS_TO_TXN].max_version == 3

    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy, client = proxy_of(network, tasks)
            client.send(frame(build_request_header(ApiKey.ADD_PARTITIONS_TO_TXN, 4, 5, "client") + b"\x02" + bytes(40)))
            await asyncio.sleep(30)
            assert client.has_ended
            assert proxy.metrics.closed == {"protocol_error": 1}
            assert network.brokers[0].received == b""

    run_virtually(main)
