"""The client side of SASL against a scripted broker: its messages, its refusals, and no secret in an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from protocol.errors import ErrorCode
from tiers.broker.sasl import SaslCredentials, authenticate
from tiers.errors import BrokerError

SECRET = "s3cr3t"
PLAIN = SaslCredentials("PLAIN", "ann", SECRET)


class Server:
    """Answers SaslAuthenticate by `answers`, in order: what it says, or an error."""

    def __init__(self, *answers: bytes | str, lifetime_ms: int = 0) -> None:
        self.heard: list[bytes] = []
        self._answers = list(answers)
        self._lifetime_ms = lifetime_ms

    async def ask(self, message: Any, version: int) -> memoryview:
        response: Any
        if message.name == "SaslHandshakeRequest":
            is_known = message.mechanism != "OAUTHBEARER" or "no-oauth" not in self._answers
            response = SaslHandshakeResponse(error_code=0 if is_known else 33, mechanisms=["PLAIN"])
            if "no-sasl" in self._answers:
                response = SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=[])
        else:
            self.heard.append(bytes(message.auth_bytes))
            answer = self._answers.pop(0)
            failed = isinstance(answer, str)
            response = SaslAuthenticateResponse(
                error_code=58 if failed else 0,
                error_message=answer if failed else None,
                auth_bytes=b"" if failed else answer,
                session_lifetime_ms=self._lifetime_ms,
            )
        response.API_VERSION = version
        return memoryview(response.encode(version=version, header=False, framed=False))


async def failure(server: Server, credentials: SaslCredentials) -> str:
    with pytest.raises(BrokerError) as raised:
        await authenticate(credentials, server.ask, (0, 2))
    assert raised.value.retriable
    assert raised.value.code is not None
    assert SECRET not in repr(raised.value) + repr(raised.value.__cause__) + repr(raised.value.__context__)
    return str(raised.value)


async def test_plain_sends_its_user_and_learns_the_session_lifetime() -> None:
    server = Server(b"", lifetime_ms=60_000)
    assert await authenticate(PLAIN, server.ask, (0, 2)) == 60_000
    assert server.heard == [b"\0ann\0" + SECRET.encode()]
    assert SECRET not in repr(PLAIN)


async def test_a_token_is_read_for_every_authentication(tmp_path: Path) -> None:
    file = tmp_path / "token"
    credentials = SaslCredentials("OAUTHBEARER", token_file=file)
    server = Server(b"", b"")
    for token in ("one", "two"):
        file.write_text(f"{token}\n")
        assert await authenticate(credentials, server.ask, (0, 2)) == 0
    assert server.heard == [b"n,,\x01auth=Bearer one\x01\x01", b"n,,\x01auth=Bearer two\x01\x01"]


async def test_a_refused_token_is_acknowledged_before_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    server = Server(b'{"status":"invalid_token"}', "invalid token")
    assert "invalid token" in await failure(server, SaslCredentials("OAUTHBEARER", token_file=file))
    assert server.heard[1] == b"\x01"


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff", b"two\x01parts"])
async def test_a_file_without_a_token_is_named(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    server = Server()
    assert str(file) in await failure(server, SaslCredentials("OAUTHBEARER", token_file=file))
    assert server.heard == []


@pytest.mark.parametrize(
    ("refusal", "credentials", "said"),
    [
        ("no-oauth", SaslCredentials("OAUTHBEARER"), "[upstream.sasl]: the broker offers PLAIN: see mechanism"),
        (
            "no-sasl",
            PLAIN,
            "this listener of the broker has no SASL: remove [upstream.sasl], or use the broker's SASL port",
        ),
        ("no such user", PLAIN, "no such user"),
    ],
)
async def test_the_reason_of_a_refusal_is_passed_on(refusal: str, credentials: SaslCredentials, said: str) -> None:
    assert said in await failure(Server(refusal), credentials)


async def test_scram_escapes_the_name_and_trusts_no_weak_or_false_server() -> None:
    credentials = SaslCredentials("SCRAM-SHA-256", "a=b,c", SECRET)
    weak = Server(b"r=x,s=c2FsdA==,i=1")
    assert "too few iterations" in await failure(weak, credentials)
    assert weak.heard[0].startswith(b"n,,n=a=3Db=2Cc,r=")
    for false in (b"r=x,s=c2FsdA==,i=4096", b"nonsense,i=4096", b"r=\xff,i=4096"):
        assert "does not know the password" in await failure(Server(false), credentials)
