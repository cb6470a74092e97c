"""The frames of an authentication, as a client and a broker send them."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.primitives import INT16, INT32
from tests.support.fakes.broker.wire import request, response


def handshake(version: int, mechanism: str, correlation_id: int = 1) -> bytes:
    return request(ApiKey.SASL_HANDSHAKE, version, correlation_id, INT16.pack(len(mechanism)) + mechanism.encode())


def handshake_answer(error_code: int = ErrorCode.NONE, correlation_id: int = 1) -> bytes:
    """The answer names no mechanisms."""
    return response(correlation_id, INT16.pack(error_code) + INT32.pack(0))


def authenticate(token: bytes, correlation_id: int = 1) -> bytes:
    """Returns a request of SaslAuthenticate version 1."""
    return request(ApiKey.SASL_AUTHENTICATE, 1, correlation_id, INT32.pack(len(token)) + token)


def authenticate_answer(correlation_id: int = 1, error_code: int = ErrorCode.NONE, token: bytes = b"") -> bytes:
    """Returns an answer to SaslAuthenticate version 1, without an error message and a lifetime of the session."""
    body = INT16.pack(error_code) + INT16.pack(-1) + INT32.pack(len(token)) + token + bytes(8)
    return response(correlation_id, body)
