"""Handles Produce: the request's bytes are forwarded as they arrive.

The request's acks tell whether a response will follow. A response may name the address of a new leader.
"""

from __future__ import annotations

from protocol.addresses import AddressOf, carries_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.apis.produce import names_no_broker, peek_acks
from protocol.errors import TruncatedError
from proxy.handlers.addresses import with_addresses
from proxy.wire.exchange import BegunRequest, CutThrough, Respond

_NO_RESPONSE = CutThrough(no_response=True), None


class ProduceHandler:
    def __init__(self) -> None:
        self._decisions: dict[tuple[int, AddressOf], tuple[CutThrough, Respond | None]] = {}
        """By version and listener, for requests with a response. A request has no state of its own, so they share a
        decision."""

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None]:
        key = version, address_of = begun.api_version, begun.address_of
        decision = self._decisions.get(key)
        if decision is None:
            check_version(ApiKey.PRODUCE, version)
            decision = self._decisions[key] = _decide(version, address_of)
        acks = peek_acks(prefix)
        if acks is None:
            raise TruncatedError("a Produce request ends before its acks")
        return _NO_RESPONSE if acks == 0 else decision


def _decide(version: int, address_of: AddressOf) -> tuple[CutThrough, Respond | None]:
    if not carries_addresses(ApiKey.PRODUCE, version):
        return CutThrough(), None
    action = CutThrough(hold_bytes=None, passes=lambda response: names_no_broker(response, version))
    return action, with_addresses(ApiKey.PRODUCE, version, address_of)
