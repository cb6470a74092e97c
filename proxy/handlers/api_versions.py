"""Handles ApiVersions: intersects the broker's version ranges with the proxy's own (docs/semantics.md 1.3).

Features and tags stay as the broker sent them.
"""

from __future__ import annotations

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.api_versions import intersect_api_versions, unsupported_version_response
from proxy.wire.exchange import Answer, Exchange, Forward, Respond


class ApiVersionsHandler:
    """Implements `Handler`.

    If the request's version is above the proxy's own, the proxy answers as a broker does: with a version 0 response,
    error 35 and the proxy's range of ApiVersions."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        request = exchange.request
        if request.api_version not in DECODED_APIS[ApiKey.API_VERSIONS]:
            return Answer((unsupported_version_response(request.correlation_id),)), None
        version = request.api_version
        return Forward(request.frame, hold_bytes=None), lambda response: (intersect_api_versions(response, version),)
