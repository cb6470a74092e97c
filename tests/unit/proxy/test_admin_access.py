"""Who may read the pages of the admin port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.admin.api import RELOAD
from proxy.config import AdminConfig, TidegateConfig
from proxy.process.admin.access import CHECK_INTERVAL_MS, AdminTokenError, TokenFile, admin_access
from proxy.process.admin.http import admin_pages
from proxy.process.live_settings import Reload
from tests.support.proxy.page_facts import NoPages, ScriptedFacts
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.certificates import Authority
from tiers.config.tier_config import ConfigError

PROTECTED, OPEN = ("/metrics", "/", "/topics", "/api/v1/errors", "/static/page.js"), ("/livez", "/servez", "/readyz")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("secret\n")
    return file


@asynccontextmanager
async def admin_port(*reload: Reload, **settings: Any) -> AsyncIterator[int]:
    access = admin_access(AdminConfig.model_validate(settings))
    facts, reads = ScriptedFacts(), next(iter(reload), None)
    async with admin_pages(("127.0.0.1", 0), NoPages(), facts, access, reload=reads) as (_, port):
        yield port


async def statuses(url: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None) -> set[int]:
    """Returns the statuses of the protected pages."""
    found = set()
    async with aiohttp.ClientSession(headers=headers) as session:
        for page in OPEN:
            async with session.get(url + page, ssl=tls or True) as response:
                assert response.status == 200
        for page in PROTECTED:
            async with session.get(url + page, ssl=tls or True) as response:
                found.add(response.status)
    return found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "tidegate.example.org"])
def test_an_address_that_others_reach_needs_a_token_or_a_client_ca(host: str, tmp_path: Path) -> None:
    upstream = '[upstream]\nbootstrap.servers = "a:1"\n'
    state = f'[state]\npath = "{tmp_path}"\n'
    admin = f'[admin]\nhost = "{host}"\n'
    with pytest.raises(ConfigError, match=r"set token\.file, or client\.ca in \[admin\.tls\], or host"):
        parse_config(upstream + state + admin)
    with pytest.raises(ConfigError, match=r"token\.file"):
        parse_config(upstream + state + admin + '[admin.tls]\ncertificate = "c.pem"\n')
    parse_config(upstream + state + admin + "port = 0\n")
    parse_config(upstream + state + admin + 'token.file = "token"\n')
    parse_config(upstream + state + admin + '[admin.tls]\ncertificate = "c.pem"\nclient.ca = "ca.pem"\n')


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_address_needs_nothing(host: str) -> None:
    assert AdminConfig(host=host).token_file is None


async def test_the_token_opens_metrics_and_the_page(token_file: Path) -> None:
    async with admin_port(**{"token.file": token_file}) as port:
        url = f"http://127.0.0.1:{port}"
        assert await statuses(url) == {401}
        wrong = base64.b64encode(b"secret:wrong").decode()
        for header in ("Bearer secre", "Bearer secret2", "Basic secret", f"Basic {wrong}", "secret", "Bearer \u00e9"):
            assert await statuses(url, {"Authorization": header}) == {401}
        assert await statuses(url, {"Authorization": "Bearer secret"}) == {200}
        password = base64.b64encode(b"anybody:secret").decode()
        assert await statuses(url, {"Authorization": f"Basic {password}"}) == {200}
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            challenges = response.headers.getall("WWW-Authenticate")
    assert challenges == ["Bearer", 'Basic realm="Tidegate", charset="UTF-8"']


@pytest.mark.parametrize("host", ["evil.example.org", "evil.example.org:9190", "localhost.evil.example.org"])
async def test_an_open_port_answers_no_name_of_a_stranger(host: str) -> None:
    """A stranger's page in a browser on this machine would read the port under a name of its own."""
    async with admin_port() as port:
        assert await statuses(f"http://127.0.0.1:{port}", {"Host": host}) == {403}
        for own in ("localhost", f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert await statuses(f"http://127.0.0.1:{port}", {"Host": own}) == {200}


def test_a_changed_token_is_read_again(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_ms = 0
    token = TokenFile(token_file, lambda: now_ms)
    token_file.write_text("the next one")
    assert token.current() == "secret", "the file is looked at once a second"
    now_ms += CHECK_INTERVAL_MS
    assert (token.current(), token.trouble) == ("the next one", "")
    for text in ("", "caf\u00e9"):
        token_file.write_text(text)
        now_ms += CHECK_INTERVAL_MS
        assert str(token_file) in token.trouble
        assert token.current() == "the next one"
    token_file.unlink()
    now_ms += CHECK_INTERVAL_MS
    assert token.current() == "the next one"
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "ERROR", "ERROR"]
    assert "the next one" not in caplog.text
    token_file.write_text("the last one")
    now_ms += CHECK_INTERVAL_MS
    assert (token.trouble, token.current()) == ("", "the last one")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "No such file"),
        (b" \n", "there is no token in it"),
        (b"one\ntwo\n", "a token is one line of printable ASCII characters"),
        (b"\xff\xfe", "a token is one line of printable ASCII characters"),
    ],
)
def test_a_file_without_a_token_ends_the_start(token_file: Path, written: bytes | None, said: str) -> None:
    token_file.unlink() if written is None else token_file.write_bytes(written)
    with pytest.raises(AdminTokenError, match=f"{token_file}: .*{said}"):
        admin_access(AdminConfig.model_validate({"token.file": token_file}))


async def test_a_client_certificate_or_the_token_opens_the_pages(tmp_path: Path, token_file: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    tls = {"certificate": authority.identity("proxy"), "client.ca": authority.ca}
    async with admin_port(tls=tls, **{"token.file": token_file}) as port:
        url = f"https://localhost:{port}"
        nobody, known, unknown = (ssl.create_default_context(cafile=authority.ca) for _ in range(3))
        known.load_cert_chain(authority.identity("prometheus"))
        unknown.load_cert_chain(stranger.identity("prometheus"))
        assert await statuses(url, tls=nobody) == {401}
        assert await statuses(url, tls=known) == {200}
        assert await statuses(url, {"Authorization": "Bearer secret"}, nobody) == {200}
        with pytest.raises(aiohttp.ClientError):
            await statuses(url, tls=unknown)


def resumable(
    port: int, tls: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[str, ssl.SSLSession | None]:
    """Returns the status of a protected page, and the TLS session of the connection."""
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        tls.wrap_socket(raw, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := connection.recv(65_536):
            answer += part
        return answer[9:12].decode(), connection.session


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_outlives_no_change_of_the_authorities(
    version: ssl.TLSVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.broker.tls.CHECK_INTERVAL_MS", 0)
    ours, former, next_one = (Authority(tmp_path / name) for name in ("ours", "former", "next"))
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(former.ca.read_bytes())
    client = ssl.create_default_context(cafile=ours.ca)
    client.maximum_version = version
    client.load_cert_chain(former.identity("prometheus"))
    async with admin_port(tls={"certificate": ours.identity("proxy"), "client.ca": trusted}) as port:
        status, session = await asyncio.to_thread(resumable, port, client)
        assert status == "200"
        assert session is not None
        trusted.write_bytes(next_one.ca.read_bytes())
        with contextlib.suppress(OSError):  # the proxy may end the connection before or after the client's handshake
            status = ""
            status, _ = await asyncio.to_thread(resumable, port, client, session)
        assert status == ""


async def posted(port: int, authorization: str) -> tuple[int, str]:
    headers = {"Authorization": authorization}
    url = f"http://127.0.0.1:{port}{RELOAD}"
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_only_the_bearer_token_reloads_the_settings(token_file: Path) -> None:
    """A browser sends a password by itself, also when the page of a stranger posts."""
    read: list[str] = []

    def load() -> TidegateConfig:
        read.append("file")
        raise ConfigError("tidegate.toml: unknown key x")

    reload = Reload(parse_config('[upstream]\nbootstrap.servers = "a:1"'), load, lambda _: None)
    async with admin_port(reload, **{"token.file": token_file}) as port:
        password = base64.b64encode(b"anybody:secret").decode()
        for refused in ("", "Bearer wrong", f"Basic {password}"):
            assert (await posted(port, refused))[0] == 401
        assert read == []
        status, answer = await posted(port, "Bearer secret")
        assert (status, json.loads(answer)["mistake"]) == (422, "tidegate.toml: unknown key x")
        assert read == ["file"]


async def test_a_port_without_a_token_changes_nothing() -> None:
    reload = Reload(parse_config('[upstream]\nbootstrap.servers = "a:1"'), pytest.fail, lambda _: None)
    async with admin_port(reload) as port:
        assert await posted(port, "") == (
            403,
            "a change needs the token: set token.file in [admin], or send SIGHUP to reload\n",
        )
