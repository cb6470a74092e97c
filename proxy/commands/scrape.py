"""Reads the metrics and the overview of a running proxy, and whether it is ready, from its admin port."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from proxy.admin.api import PREFIX, adapter
from proxy.admin.facts import Overview
from proxy.config import AdminConfig
from tiers.access.open_tier import RemoteTierError
from tiers.broker.tls import TlsError, explain, load_authorities
from tiers.config.tier_config import ConfigError

_TIMEOUT_S: Final = 20.0
"""The overview waits for brokers that do not answer."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # it is replaced, and not bound

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment. `at_s` is a time of the monotonic clock."""

    at_s: float
    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    def of(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Yields the samples with these labels."""
        for found, value in self.samples.get(name, ()):
            if all(found.get(key) == wanted for key, wanted in labels.items()):
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.of(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Returns the sums by the values of one label."""
        sums: dict[str, float] = {}
        for found, value in self.of(name, **labels):
            sums[found.get(label, "")] = sums.get(found.get(label, ""), 0.0) + value
        return sums


def parse_scrape(text: str, at_s: float) -> Scrape:
    """Parses Prometheus's text format. Raises `RemoteTierError`."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise RemoteTierError(f"the answer of the admin port is no metrics: {error}") from error
    return Scrape(at_s, {name: tuple(found) for name, found in samples.items()})


class AdminClient:
    """Asks one admin port. Create it by `admin_client`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def scrape(self) -> Scrape:
        """Raises `RemoteTierError` with a message of one line."""
        _, text = await self._get("/metrics", 200)
        return parse_scrape(text, time.monotonic())

    async def not_ready(self) -> list[str]:
        """Returns why the proxy is not ready, one line each. Raises `RemoteTierError`."""
        status, text = await self._get("/readyz", 200, 503)
        return text.splitlines() if status == 503 else []

    async def overview(self) -> Overview:
        """Raises `RemoteTierError`."""
        _, text = await self._get(f"{PREFIX}/overview", 200)
        try:
            found: Overview = adapter(Overview).validate_json(text)
        except ValidationError as error:
            raise RemoteTierError(
                f"the proxy at {self.url} has another release: its overview cannot be read"
            ) from error
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
