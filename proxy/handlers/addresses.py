"""Rewrites the responses of the APIs in which the proxy changes only broker addresses (docs/semantics.md 8).

The APIs are Metadata, FindCoordinator, DescribeCluster and ShareAcknowledge. The proxy holds their responses, splices
the addresses in, and keeps every other byte.
"""

from __future__ import annotations

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.steps import Steps
from proxy.handlers.turns import patched_by
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Respond

ADDRESS_APIS = (
    ApiKey.METADATA,
    ApiKey.FIND_COORDINATOR,
    ApiKey.DESCRIBE_CLUSTER,
    ApiKey.SHARE_ACKNOWLEDGE,
)


def with_addresses(api_key: int, api_version: int, address_of: AddressOf) -> Respond:
    """Returns what rewrites only the addresses in a response."""

    def rewritten(response: memoryview) -> Steps[Buffers]:
        return ((yield from rewrite_addresses.steps(api_key, api_version, response, address_of)),)

    return patched_by(rewritten)


class AddressHandler:
    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        respond = with_addresses(request.api_key, request.api_version, exchange.address_of)
        return Forward(request.frame, hold_bytes=None), respond
