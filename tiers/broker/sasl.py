"""SASL for the proxy's own connections to brokers: SaslHandshake v1, then SaslAuthenticate (docs/semantics.md 1.4).

kafka-python computes SCRAM. No exception of this module contains a secret or a message that the broker was sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kafka.net.sasl.scram import ScramClient
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from protocol.errors import ErrorCode
from tiers.errors import BrokerRefusedError

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

MIN_SCRAM_ITERATIONS: Final = 4096
"""The minimum of Kafka's own clients. A server that asks for fewer iterations could guess the password."""
_ITERATIONS = re.compile(rb"(?:^|,)i=(\d{1,9})(?:,|$)")

Ask = Callable[[Any, int], Awaitable[memoryview]]
"""Sends a request of kafka-python in the given version and returns the response's body."""


@dataclass(frozen=True, slots=True)
class SaslCredentials:
    """The credentials. `token_file` holds only the token, and is read again for every authentication."""

    mechanism: Mechanism
    username: str = ""
    password: str = field(default="", repr=False)
    token_file: Path | None = None


async def authenticate(credentials: SaslCredentials, ask: Ask, versions: tuple[int, int]) -> int:
    """Authenticates, and returns the lifetime of the session in ms; 0 means that it does not expire (KIP-368).

    `versions` are the broker's versions of SaslAuthenticate. Raises `BrokerRefusedError` and the errors of `ask`."""
    mechanism = credentials.mechanism
    body = await ask(SaslHandshakeRequest(mechanism=mechanism), 1)
    handshake = SaslHandshakeResponse.decode(body, version=1)
    if handshake.error_code:
        reason = f"the broker offers {', '.join(handshake.mechanisms)}: see mechanism"
        if not handshake.mechanisms:
            reason = "this listener of the broker has no SASL: remove [upstream.sasl], or use the broker's SASL port"
        raise _failed(handshake.error_code, reason)
    version = min(versions[1], int(SaslAuthenticateRequest.max_version))
    async with aclosing(_tokens(credentials)) as tokens:
        token = await anext(tokens)
        while True:
            body = await ask(SaslAuthenticateRequest(auth_bytes=token), version)
            response = SaslAuthenticateResponse.decode(body, version=version)
            if response.error_code:
                reason = response.error_message or "the broker gives no reason"
                setting = "token.file" if mechanism == "OAUTHBEARER" else "username and password"
                raise _failed(response.error_code, f"{reason}: see {setting}")
            try:
                token = await tokens.asend(bytes(response.auth_bytes or b""))
            except StopAsyncIteration:
                return max(0, int(response.session_lifetime_ms)) if version >= 1 else 0


async def _tokens(credentials: SaslCredentials) -> AsyncGenerator[bytes, bytes]:
    """Yields the client's messages and receives the server's. Ends when the authentication is complete."""
    match credentials.mechanism:
        case "PLAIN":
            yield f"\0{credentials.username}\0{credentials.password}".encode()
        case "OAUTHBEARER":
            error = yield f"n,,\x01auth=Bearer {_read_token(credentials.token_file)}\x01\x01".encode()
            if error:
                yield b"\x01"  # only after this message does the server report the failure (RFC 7628)
        case mechanism:
            name = credentials.username.replace("=", "=3D").replace(",", "=2C")
            scram = ScramClient(name, credentials.password, mechanism)
            first = yield scram.first_message()
            iterations = _ITERATIONS.search(first)
            if iterations is None or int(iterations[1]) < MIN_SCRAM_ITERATIONS:
                raise _failed(0, "the broker asks for too few iterations of SCRAM: configure more on the broker")
            # Many iterations take long, so they run in a thread.
            await asyncio.to_thread(_checked, scram.process_server_first_message, first)
            final = yield scram.final_message()
            _checked(scram.process_server_final_message, final)


def _checked(step: Callable[[bytes], None], message: bytes) -> None:
    try:
        step(message)
    except (ValueError, KeyError):
        raise _failed(0, "the broker's SCRAM message is invalid: it does not know the password: see password") from None


def _read_token(file: Path | None) -> str:
    try:
        token = "" if file is None else file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _failed(0, f"{file} cannot be read: {getattr(error, 'strerror', None) or 'not a token'}") from None
    if not token or not token.isprintable():
        raise _failed(0, f"{file} holds no token")
    return token


def _failed(error_code: int, reason: str) -> BrokerRefusedError:
    code = error_code or int(ErrorCode.SASL_AUTHENTICATION_FAILED)
    return BrokerRefusedError(f"authentication failed, [upstream.sasl]: {reason}", code)
