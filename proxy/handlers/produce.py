"""Handles Produce: the request's bytes are forwarded as they arrive.

The request's acks tell whether a response will follow. A response may name the address of a new leader.
"""

from __future__ import annotations

from protocol.addresses import AddressOf, carries_addresses
from protocol.api_keys import ApiKey
from protocol.apis.produce import peek_acks
from protocol.errors import TruncatedError
from proxy.handlers.addresses import AddressRewriter, check_version
from proxy.wire.exchange import CutThrough, Exchange, HandlerState


class ProduceHandler:
    def __init__(self, address_of: AddressOf) -> None:
        self._address_of = address_of

    def on_prefix(self, exchange: Exchange, prefix: memoryview) -> tuple[CutThrough, HandlerState | None]:
        api_version = exchange.request.api_version
        check_version(ApiKey.PRODUCE, api_version)
        acks = peek_acks(prefix)
        if acks is None:
            raise TruncatedError("a Produce request ends before its acks")
        if acks == 0:
            return CutThrough(no_response=True), None
        if not carries_addresses(ApiKey.PRODUCE, api_version):
            return CutThrough(), None
        return CutThrough(hold_bytes=None), AddressRewriter(ApiKey.PRODUCE, api_version, self._address_of)
