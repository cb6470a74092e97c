"""The APIs whose responses carry broker addresses and nothing else that we change (semantics 8).

Metadata, FindCoordinator, DescribeCluster, ShareAcknowledge: held, addresses spliced, everything else verbatim.
"""

from __future__ import annotations

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.errors import ProtocolError
from proxy.exchange import Answer, Buffers, Exchange, Forward, HandlerState

ADDRESS_APIS = (
    ApiKey.METADATA,
    ApiKey.FIND_COORDINATOR,
    ApiKey.DESCRIBE_CLUSTER,
    ApiKey.SHARE_ACKNOWLEDGE,
)


def check_version(api_key: int, api_version: int) -> None:
    """A version that was never advertised ends the connection, as brokers do."""
    versions = DECODED_APIS.get(api_key)
    if versions is None or api_version not in versions:
        raise ProtocolError(f"version {api_version} of API key {api_key}, which was not advertised")


class AddressRewriter:
    """The state of one request whose response needs no more than its addresses rewritten."""

    __slots__ = ("_address_of", "_api_key", "_api_version")

    def __init__(self, api_key: int, api_version: int, address_of: AddressOf) -> None:
        self._api_key = api_key
        self._api_version = api_version
        self._address_of = address_of

    def on_response(self, response: memoryview) -> Buffers:
        return (rewrite_addresses(self._api_key, self._api_version, response, self._address_of),)

    def on_abandoned(self) -> None:
        pass


class AddressHandler:
    def __init__(self, address_of: AddressOf) -> None:
        self._address_of = address_of

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        rewriter = AddressRewriter(request.api_key, request.api_version, self._address_of)
        return Forward(request.frame, hold_bytes=None), rewriter
