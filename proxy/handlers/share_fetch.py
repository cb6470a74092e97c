"""ShareFetch (KIP-932): the broker chooses the records and reads them, so that only its local tier is seen.

Nothing changes but NodeEndpoints, which brokers send with leadership errors alone: small responses get them rewritten,
larger ones stream and lose them. A leader that is not named there is found by Metadata.
"""

from __future__ import annotations

from protocol.addresses import AddressOf
from protocol.api_keys import ApiKey
from protocol.apis.share_fetch_stream import StreamingShareFetchPatcher
from proxy.exchange import Answer, Exchange, Forward, HandlerState
from proxy.handlers.addresses import AddressRewriter, check_version

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
