"""Handles the fetches that read only the local tier: Fetch without a remote tier, and ShareFetch (KIP-932).

The proxy changes only NodeEndpoints, which brokers send only with leadership errors (Fetch: version 16 and later). It
rewrites them in small responses. Larger responses are streamed: in Fetch, NodeEndpoints become a tag that clients skip;
in ShareFetch, they are left out, and clients find the leader with a Metadata request.
"""

from __future__ import annotations

from collections.abc import Coroutine

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.apis.fetch.response import NODE_ENDPOINTS_FROM, parse_fetch_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.fetch.share_stream import StreamingShareFetchPatcher
from protocol.apis.fetch.stream import PartitionHead, StreamingFetchPatcher
from protocol.header import response_body_position
from protocol.steps import Steps
from proxy.handlers.addresses import with_addresses
from proxy.handlers.turns import patch_in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Respond

HOLD_BYTES = 64 * 1024


class PassThroughFetchHandler:
    def __init__(self) -> None:
        self._responses: dict[tuple[int, AddressOf], _Responses] = {}
        """By version and listener, since a request has no state of its own."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        request = exchange.request
        key = version, address_of = request.api_version, exchange.address_of
        exchange.tier = "local"
        responses = self._responses.get(key)
        if responses is None:
            check_version(ApiKey.FETCH, version)
            responses = self._responses[key] = _Responses(version, address_of)
        if version < NODE_ENDPOINTS_FROM:
            return Forward(request.frame), None
        return Forward(request.frame, HOLD_BYTES, responses.patcher, responses.pass_untouched), responses.respond


class _Untouched:
    def partition(self, head: PartitionHead) -> None:
        return None


class _Responses:
    """The responses of one version through one listener."""

    __slots__ = ("_address_of", "_api_version")

    def __init__(self, api_version: int, address_of: AddressOf) -> None:
        self._api_version = api_version
        self._address_of = address_of

    def patcher(self) -> StreamingFetchPatcher:
        """Returns the patcher of a large response."""
        return StreamingFetchPatcher(self._api_version, _Untouched(), hide_node_endpoints=True)

    def pass_untouched(self, response: memoryview) -> bool:
        body_position = response_body_position(ApiKey.FETCH, self._api_version, response)
        return plain_topics(response, body_position, self._api_version) is not None

    def respond(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return patch_in_turns(self._patched(response))

    def _patched(self, response: memoryview) -> Steps[Buffers]:
        body_position = response_body_position(ApiKey.FETCH, self._api_version, response)
        parsed = yield from parse_fetch_response.steps(response, body_position, self._api_version)
        if parsed.node_endpoints_bounds() is None:
            return (response,)
        return ((yield from rewrite_addresses.steps(ApiKey.FETCH, self._api_version, response, self._address_of)),)


class ShareFetchHandler:
    """Handles ShareFetch, whose records the broker chooses and reads."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        request = exchange.request
        check_version(ApiKey.SHARE_FETCH, request.api_version)
        exchange.tier = "local"
        respond = with_addresses(ApiKey.SHARE_FETCH, request.api_version, exchange.address_of)
        return Forward(request.frame, HOLD_BYTES, StreamingShareFetchPatcher), respond
