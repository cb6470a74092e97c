"""SASL of our own connections to brokers: SaslHandshake v1, then SaslAuthenticate until it is done (semantics 1.4).

The computation of SCRAM is kafka-python's. No exception of this file carries a secret, nor what the broker was sent.
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
"""As Kafka's own clients: a server that asks for less is after the password."""
_ITERATIONS = re.compile(rb"(?:^|,)i=(\d{1,9})(?:,|$)")

Ask = Callable[[Any, int], Awaitable[memoryview]]
"""Sends a request of kafka-python in this version; returns the response's body."""


@dataclass(frozen=True, slots=True)
class SaslCredentials:
    """`token_file` is read again for every authentication, and holds nothing but the token."""

    mechanism: Mechanism
    username: str = ""
    password: str = field(default="", repr=False)
    token_file: Path | None = None


async def authenticate(credentials: SaslCredentials, ask: Ask, versions: tuple[int, int]) -> int:
    """Returns how long the session lasts in ms, 0 for ever (KIP-368). `versions` are the broker's of SaslAuthenticate.

    Raises `BrokerRefusedError`, and what `ask` raises."""
    mechanism = credentials.mechanism
    body = await ask(SaslHandshakeRequest(mechanism=mechanism), 1)
    handshake = SaslHandshakeResponse.decode(body, version=1)
    if handshake.error_code:
        raise _failed(handshake.error_code, f"the broker offers {', '.join(handshake.mechanisms)}: see mechanism")
    version = min(versions[1], int(SaslAuthenticateRequest.max_version))
    lifetime_ms = 0
    challenge = b""
    async with aclosing(_tokens(credentials)) as tokens:
        token = await anext(tokens)
        while True:
            body = await ask(SaslAuthenticateRequest(auth_bytes=token), version)
            response = SaslAuthenticateResponse.decode(body, version=version)
            if response.error_code:
                reason = response.error_message or "the broker says no more"
                setting = "token.file" if mechanism == "OAUTHBEARER" else "username and password"
                raise _failed(response.error_code, f"{reason}: see {setting}")
            challenge = bytes(response.auth_bytes or b"")
            lifetime_ms = max(0, int(response.session_lifetime_ms)) if version >= 1 else 0
            try:
                token = await tokens.asend(challenge)
            except StopAsyncIteration:
                return lifetime_ms


async def _tokens(credentials: SaslCredentials) -> AsyncGenerator[bytes, bytes]:
    """What the client says; is sent what the server says. Ends when the server has proven enough."""
    match credentials.mechanism:
        case "PLAIN":
            yield f"\0{credentials.username}\0{credentials.password}".encode()
        case "OAUTHBEARER":
            error = yield f"n,,\x01auth=Bearer {_read_token(credentials.token_file)}\x01\x01".encode()
            if error:
                yield b"\x01"  # the failure itself comes only after this (RFC 7628)
        case mechanism:
            name = credentials.username.replace("=", "=3D").replace(",", "=2C")
            scram = ScramClient(name, credentials.password, mechanism)
            first = yield scram.first_message()
            iterations = _ITERATIONS.search(first)
            if iterations is None or int(iterations[1]) < MIN_SCRAM_ITERATIONS:
                raise _failed(0, "the broker asks for too few iterations of SCRAM")
            # Many iterations take their time.
            await asyncio.to_thread(_checked, scram.process_server_first_message, first)
            final = yield scram.final_message()
            _checked(scram.process_server_final_message, final)


def _checked(step: Callable[[bytes], None], message: bytes) -> None:
    try:
        step(message)
    except (ValueError, KeyError):
        raise _failed(0, "the broker's part of SCRAM is wrong: it does not know the password: see password") from None


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
