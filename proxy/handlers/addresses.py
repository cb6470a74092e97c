"""Rewrites the responses of the APIs in which the proxy changes only broker addresses (docs/semantics.md 8).

The APIs are Metadata, FindCoordinator, DescribeCluster and ShareAcknowledge. The proxy holds their responses, splices
the addresses in, and keeps every other byte.
"""

from __future__ import annotations

from collections.abc import Coroutine

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.steps import Steps
from proxy.handlers.turns import patch_in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, HandlerState

ADDRESS_APIS = (
    ApiKey.METADATA,
    ApiKey.FIND_COORDINATOR,
    ApiKey.DESCRIBE_CLUSTER,
    ApiKey.SHARE_ACKNOWLEDGE,
)


class AddressRewriter:
    """The state of one request. Rewrites only the addresses in the response."""

    __slots__ = ("_address_of", "_api_key", "_api_version")

    def __init__(self, api_key: int, api_version: int, address_of: AddressOf) -> None:
        self._api_key = api_key
        self._api_version = api_version
        self._address_of = address_of

    def on_response(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        return patch_in_turns(self._rewritten(response))

    def _rewritten(self, response: memoryview) -> Steps[Buffers]:
        rewritten = yield from rewrite_addresses.steps(self._api_key, self._api_version, response, self._address_of)
        return (rewritten,)

    def on_abandoned(self) -> None:
        pass


class AddressHandler:
    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        rewriter = AddressRewriter(request.api_key, request.api_version, exchange.address_of)
        return Forward(request.frame, hold_bytes=None), rewriter
