"""`SaslExchange`: follows the authentication of one client with its broker (docs/semantics.md 1.4).

The proxy checks no credentials. It reads the broker's answers, so that it knows which client the broker has
authenticated, and where the tokens without headers end that follow SaslHandshake version 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from protocol.api_keys import DECODED_APIS, ApiKey, is_flexible
from protocol.errors import ErrorCode, ProtocolError
from protocol.header import parse_request_header, response_body_position
from protocol.primitives import Buffer, read_bytes_bounds, read_int16, read_string
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Respond

AUTHENTICATION_APIS = frozenset((ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE))
BEFORE_AUTHENTICATION = AUTHENTICATION_APIS | {ApiKey.API_VERSIONS}
"""The only requests that a broker answers before the client has authenticated."""


def _scram_ends(token: Buffer) -> bool:
    """The server's last message has its signature. The message before it has a nonce (RFC 5802)."""
    return bytes(token[:2]) == b"v="


@dataclass(frozen=True, slots=True)
class _Mechanism:
    max_tokens: int
    """The largest number of tokens that a client sends."""
    ends_with: Callable[[Buffer], bool]
    """Returns whether this token of the broker ends a successful authentication.

    A broker sends a token without an error code also for an authentication that fails in its next step."""


_MECHANISMS: Mapping[str, _Mechanism] = {
    "PLAIN": _Mechanism(1, lambda _: True),
    "OAUTHBEARER": _Mechanism(2, lambda token: not len(token)),
    "SCRAM-SHA-256": _Mechanism(2, _scram_ends),
    "SCRAM-SHA-512": _Mechanism(2, _scram_ends),
}


class SaslExchange:
    """Implements `Handler` for SaslHandshake, SaslAuthenticate, and tokens without a header.

    While an answer is awaited, the connection must not process the client's next request: the answer says what the next
    bytes are, and which rights the client has."""

    def __init__(self) -> None:
        self.is_authenticated = False
        """The broker has authenticated the client, and the client has not begun another authentication since."""
        self.is_doubtful = False
        """The broker has taken a token of a mechanism whose end the proxy does not know.

        The next request shows it: a broker answers it only if it has authenticated the client, and else closes. Until
        the answer, that request is the only one in progress."""
        self.awaits_answer = False
        self._mechanism = ""
        self.raw_tokens_left = 0
        """How many more tokens without a header the client may send. If it is not 0, the next frame is one."""

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        """Raises `ProtocolError` for a version that was not advertised, and if the end of the tokens is unknown."""
        request = exchange.request
        self.awaits_answer = True
        if self.raw_tokens_left:
            self.raw_tokens_left -= 1
            return Forward(request.frame, hold_bytes=None), self._answer_to_raw_token
        if request.api_version not in DECODED_APIS[request.api_key]:
            raise ProtocolError(f"version {request.api_version} of API key {request.api_key}, which was not advertised")
        if request.api_key == ApiKey.SASL_AUTHENTICATE:
            return Forward(request.frame, hold_bytes=None), partial(self._answer_to_token, request.api_version)
        mechanism, _ = read_string(request.frame, parse_request_header(request.frame).body_position, False)
        if request.api_version == 0 and mechanism not in _MECHANISMS:
            raise ProtocolError(
                f"SaslHandshake version 0 for the mechanism {mechanism!r}: the proxy cannot tell where the tokens end; "
                "the client must use SaslHandshake version 1"
            )
        respond = partial(self._answer_to_handshake, request.api_version, mechanism or "")
        return Forward(request.frame, hold_bytes=None), respond

    def _answer_to_handshake(self, version: int, mechanism: str, response: memoryview) -> Buffers:
        """An authentication begins if the broker accepted it. Otherwise everything is as before."""
        error_code, _ = read_int16(response, response_body_position(ApiKey.SASL_HANDSHAKE, version, response))
        self.awaits_answer = False
        if error_code == ErrorCode.NONE:
            self.is_authenticated = self.is_doubtful = False
            self._mechanism = mechanism
            self.raw_tokens_left = _MECHANISMS[mechanism].max_tokens if version == 0 else 0
        return (response,)

    def _answer_to_token(self, version: int, response: memoryview) -> Buffers:
        compact = is_flexible(ApiKey.SASL_AUTHENTICATE, version)
        error_code, pos = read_int16(response, response_body_position(ApiKey.SASL_AUTHENTICATE, version, response))
        _, pos = read_string(response, pos, compact)
        start, end = read_bytes_bounds(response, pos, compact)
        self._on_token(error_code, response[start : max(start, end)])
        return (response,)

    def _answer_to_raw_token(self, token: memoryview) -> Buffers:
        """Raises `ProtocolError` if the client has sent its last token and the authentication has not ended."""
        self._on_token(ErrorCode.NONE, token)
        if self.is_authenticated:
            self.raw_tokens_left = 0
        elif not self.raw_tokens_left:
            raise ProtocolError("a SASL token that does not end the authentication")
        return (token,)

    def _on_token(self, error_code: int, token: Buffer) -> None:
        """The broker has answered the client's token.

        ILLEGAL_SASL_STATE answers a request outside of an authentication, and changes nothing."""
        self.awaits_answer = False
        if error_code == ErrorCode.NONE:
            known = _MECHANISMS.get(self._mechanism)
            self.is_doubtful = known is None
            self.is_authenticated = known is not None and known.ends_with(token)
        elif error_code != ErrorCode.ILLEGAL_SASL_STATE:
            self.is_authenticated = self.is_doubtful = False

    def on_answer(self, api_key: int) -> None:
        """The broker has answered a request of the client."""
        if self.is_doubtful and api_key not in BEFORE_AUTHENTICATION:
            self.is_doubtful = False
            self.is_authenticated = True
