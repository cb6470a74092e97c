"""The ring of the last errors."""

from __future__ import annotations

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import TruncatedError
from protocol.header import build_request_header
from proxy.process.app import pass_through_handlers
from proxy.wire.error_log import ErrorLog, FaultyFrame
from tests.support.fakes.broker.wire import request, response
from tests.support.proxy.proxy_harness import forwarded, relayed

SECRET = b"the record's own bytes"


def test_an_entry_has_peer_client_id_api_and_position() -> None:
    log = ErrorLog(wall_clock_ms=lambda: 1_000)
    frame = build_request_header(ApiKey.METADATA, 12, 7, "app") + b"\x05"
    log.note(
        "undecodable",
        TruncatedError("an array announces 4 elements", 15),
        peer="10.0.0.1:5",
        node_id=2,
        frame=FaultyFrame("client", frame),
    )
    (entry,) = log.incidents
    assert (entry.time_ms, entry.kind, entry.reason) == (1_000, "undecodable", "an array announces 4 elements")
    assert (entry.peer, entry.node_id, entry.client_id, entry.sender) == ("10.0.0.1:5", 2, "app", "client")
    assert (entry.api, entry.api_version, entry.position) == ("METADATA", 12, 15)


def test_the_ring_keeps_the_last_entries() -> None:
    log = ErrorLog(max_incidents=3)
    for number in range(5):
        log.note("refused", f"limit {number}", peer=None)
    assert [entry.reason for entry in log.incidents] == ["limit 2", "limit 3", "limit 4"]


@pytest.mark.parametrize(
    "frame",
    [
        b"secret",
        b"secret!!",
        b"\x00\x03\x00\x0c\x00\x00\x00\x07\x7f\xff" + SECRET,
        b"\x03\xe7\x00\x00\x00\x00\x00\x07\x00\x03app" + SECRET,
        build_request_header(ApiKey.METADATA, 12, 7, "a record") + SECRET,
        build_request_header(ApiKey.METADATA, 12, 7, None) + SECRET,
    ],
    ids=["too short", "no client id", "cut", "unknown API", "another client id", "a null client id"],
)
def test_a_frame_that_may_be_no_request_has_no_client_id(frame: bytes) -> None:
    """A client that counts the bytes of a request wrongly sends the rest of it as a frame of its own."""
    log = ErrorLog()
    log.note("undecodable", "damaged", peer=None, client_id="app", frame=FaultyFrame("client", frame))
    (entry,) = log.incidents
    assert (entry.client_id, entry.api, entry.api_version) == ("app", None, None)


async def test_an_undecodable_request_is_noted_with_its_sender() -> None:
    async with relayed(handlers=pass_through_handlers()) as (client, _, proxy):
        await client.send(request(ApiKey.FETCH, 3, 2, b"\x00"))
        assert await client.ended() == b""
        (entry,) = proxy.server.errors.incidents
    assert (entry.kind, entry.sender, entry.client_id, entry.api) == ("undecodable", "client", "test", "FETCH")
    assert str(entry.peer).startswith("127.0.0.1:")


async def test_an_undecodable_response_is_noted_with_the_api_of_its_request() -> None:
    async with relayed(handlers=pass_through_handlers()) as (client, broker, proxy):
        upstream = await forwarded(client, broker, request(ApiKey.METADATA, 9, 3, b"\x01\x00\x00\x00\x00"))
        await upstream.send(response(3, b"\x00" * 4))
        assert await client.ended() == b""
        (entry,) = proxy.server.errors.incidents
    assert (entry.kind, entry.sender, entry.api, entry.api_version) == ("undecodable", "broker", "METADATA", 9)
    assert entry.position is not None
