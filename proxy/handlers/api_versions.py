"""ApiVersions: the broker's ranges, cut to what passes here; features and tags verbatim (semantics 1.3)."""

from __future__ import annotations

from protocol.api_keys import DECODED_APIS, HIDDEN_APIS, ApiKey
from protocol.apis.api_versions import intersect_api_versions, unsupported_version_response
from proxy.exchange import Answer, Buffers, Exchange, Forward, HandlerState


class ApiVersionsHandler:
    """A version above ours is answered as a broker answers one above its own: version 0, error 35, our range."""

    def __init__(self, hidden: frozenset[ApiKey] = HIDDEN_APIS) -> None:
        self._hidden = hidden

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        request = exchange.request
        if request.api_version not in DECODED_APIS[ApiKey.API_VERSIONS]:
            return Answer((unsupported_version_response(request.correlation_id),)), None
        return Forward(request.frame, hold_bytes=None), _Intersection(request.api_version, self._hidden)


class _Intersection:
    __slots__ = ("_api_version", "_hidden")

    def __init__(self, api_version: int, hidden: frozenset[ApiKey]) -> None:
        self._api_version = api_version
        self._hidden = hidden

    def on_response(self, response: memoryview) -> Buffers:
        return (intersect_api_versions(response, self._api_version, self._hidden),)

    def on_abandoned(self) -> None:
        pass
