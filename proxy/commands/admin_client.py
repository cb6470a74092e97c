"""Reads the overview and the topics of a running proxy from its admin port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import aiohttp
from pydantic import ValidationError

from proxy.admin.api import PREFIX, adapter
from proxy.admin.facts import Overview, TopicsPage
from proxy.config import AdminConfig
from tiers.access.open_tier import RemoteTierError
from tiers.broker.tls import TlsError, explain, load_authorities
from tiers.config.tier_config import ConfigError

_TIMEOUT_S: Final = 20.0
"""The overview waits for brokers that do not answer."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # it is replaced, and not bound


Answer = TypeVar("Answer")


class AdminClient:
    """Asks one admin port. Create it by `admin_client`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def overview(self) -> Overview:
        """Raises `RemoteTierError` with a message of one line."""
        _, text = await self._get(f"{PREFIX}/overview", 200)
        return self._parsed(Overview, text)

    async def largest_backlogs(self) -> TopicsPage | None:
        """Returns the topics by their backlog, the largest first. None: no process knows them now.

        Raises `RemoteTierError`."""
        status, text = await self._get(f"{PREFIX}/topics?sort=backlog&descending=true", 200, 503)
        return self._parsed(TopicsPage, text) if status == 200 else None

    def _parsed(self, answer: type[Answer], text: str) -> Answer:
        try:
            found: Answer = adapter(answer).validate_json(text)
        except ValidationError as error:
            raise RemoteTierError(f"the proxy at {self.url} has another release: its answer cannot be read") from error
        return found

    async def _get(self, path: str, *expected: int) -> tuple[int, str]:
        try:
            async with self._session.get(f"{self.url}{path}") as response:
                text = await response.text()
                if response.status == 401 and "Authorization" in self._session.headers:
                    raise RemoteTierError(
                        f"the admin port at {self.url} refuses the token of [admin] token.file: use the file of the"
                        " proxy that has this port"
                    )
                if response.status == 401:
                    raise RemoteTierError(
                        f"the admin port at {self.url} asks for a token or a client certificate: use the file of the"
                        " proxy, which names `token.file`"
                    )
                if response.status not in expected:
                    raise RemoteTierError(f"the admin port at {self.url} answers {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The text of aiohttp's own errors repeats the address.
            cause = getattr(error, "certificate_error", getattr(error, "os_error", error))
            reason = explain(cause) if isinstance(cause, OSError) else str(error) or repr(error)
            raise RemoteTierError(f"no process answers at {self.url}: is `tidegate serve` running? {reason}") from error
        return response.status, text


@asynccontextmanager
async def admin_client(config: AdminConfig) -> AsyncIterator[AdminClient]:
    """Yields a client for the admin port that the file names. Raises `ConfigError`."""
    if not config.port:
        raise ConfigError("the admin port is off: set [admin] port")
    host = _EVERYWHERE.get(config.host, config.host)
    shown = f"[{host}]" if ":" in host else host
    url = f"{'http' if config.tls is None else 'https'}://{shown}:{config.port}"
    headers = {}
    if config.token_file is not None:
        try:
            headers["Authorization"] = f"Bearer {config.token_file.read_text().strip()}"
        except OSError as error:
            raise ConfigError(f"[admin] token.file: {config.token_file}: {error.strerror}") from error
    connector = None if config.tls is None else aiohttp.TCPConnector(ssl=_tls(config))
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield AdminClient(session, url)


def _tls(config: AdminConfig) -> ssl.SSLContext:
    """Trusts the certificate of the proxy's own file. The address may be another one than the certificate names."""
    assert config.tls is not None
    context = ssl.create_default_context()
    context.check_hostname = False
    try:
        load_authorities(context, "certificate", config.tls.certificate)
    except TlsError as error:
        raise ConfigError(f"[admin.tls] {error}") from error
    return context
