"""Handles ShareFetch (KIP-932), which reads only the local tier: the broker chooses and reads the records.

The proxy changes only NodeEndpoints, which brokers send only with leadership errors. It rewrites them in small
responses. Larger responses are streamed without them; clients then find the leader with a Metadata request.
"""

from __future__ import annotations

from protocol.addresses import AddressOf
from protocol.api_keys import ApiKey
from protocol.apis.fetch.share_stream import StreamingShareFetchPatcher
from proxy.handlers.addresses import AddressRewriter, check_version
from proxy.wire.exchange import Answer, Exchange, Forward, HandlerState

HOLD_BYTES = 64 * 1024


class ShareFetchHandler:
    def __init__(self, address_of: AddressOf) -> None:
        self._address_of = address_of

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        request = exchange.request
        check_version(ApiKey.SHARE_FETCH, request.api_version)
        exchange.tier = "local"
        rewriter = AddressRewriter(ApiKey.SHARE_FETCH, request.api_version, self._address_of)
        return Forward(request.frame, HOLD_BYTES, StreamingShareFetchPatcher()), rewriter
