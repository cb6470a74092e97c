"""`TidegateConfig`: the settings of a proxy, which are those of the remote tier and the proxy's own sections."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from proxy.listener_config import ListenerConfig
from tiers.config.setting_keys import ONE_OR_MORE
from tiers.config.settings import MIB, PositiveBytes, PositiveMs, Section
from tiers.config.tier_config import TierConfig, load_config_file
from tiers.config.upstream_config import CertificateConfig, Host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class AdminTlsConfig(CertificateConfig):
    """TLS for the admin port. Files are in PEM format; the proxy reads them again when they change."""

    client_ca: Path | None = Field(
        default=None,
        description=(
            "The file with the authorities that sign the certificates of clients. A client with such a certificate may "
            "read all pages."
        ),
    )


class AdminConfig(Section):
    """The admin port with the page, its API (`/api/v1/`), `/metrics`, `/livez`, `/servez` and `/readyz`. `/servez`
    answers 200 while the proxy can relay requests to the brokers: one of them has a listener, and one has answered
    within `metadata.max.age.ms` plus 10 s. `/readyz` answers 200 while, besides, every broker has a listener, the
    brokers accept the proxy, and the metadata topic can be used. Other problems are alarms, and do not change its
    answer: an unusable store, or settings that were not reloaded. The port serves all processes together: the
    proxy serves while one worker serves, it is ready when each process is ready, and every time series has the label
    `process`. `/livez`, `/servez` and `/readyz` are open to everybody who reaches the port. The rest asks for a
    token or a client certificate, if one of them is set.
    """

    host: Host = Field(
        default="127.0.0.1",
        description=(
            "The address to bind. Another one than a loopback address needs `token.file`, or `client.ca` in "
            "`[admin.tls]`."
        ),
    )
    port: int = Field(default=9190, ge=0, lt=65_536, description="The port. 0 turns the admin port off.")
    token_file: Path | None = Field(
        default=None,
        description=(
            "The file with the token that clients send as `Authorization: Bearer TOKEN`. A browser asks for it as a "
            "password, with any user name. The proxy reads the file again when it changes. Without TLS, the token "
            "crosses the network in plain text."
        ),
    )
    tls: AdminTlsConfig | None = None

    @model_validator(mode="after")
    def _check_access(self) -> AdminConfig:
        is_guarded = self.token_file is not None or (self.tls is not None and self.tls.client_ca is not None)
        if self.port and not is_guarded and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} is no loopback address, so everybody who reaches the port could read the "
                "page and /metrics: set token.file, or client.ca in [admin.tls], or host = '127.0.0.1'"
            )
        return self


class LogConfig(Section):
    """The log of the process, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level to write."
    )
    format: Literal["text", "json"] = Field(
        default="text", description="The format of the lines: text for people, or one JSON object per line."
    )


class LimitsConfig(Section):
    """The limits of each client and of all clients together."""

    max_connections: int = Field(
        default=10_000,
        ge=0,
        description=(
            "The number of client connections. 0 means no limit. The limit of open files counts too: each connection "
            "takes two of them, and the proxy needs about 500 others."
        ),
    )
    max_connections_per_address: int | None = Field(
        default=None,
        validation_alias="max.total.connections.per.address",
        ge=0,
        description=(
            "The number of client connections from one IP address, known or unknown. 0 means no limit. By default, it "
            "is a quarter of `max.connections` without an `[upstream.sasl]`, and 0 with one. Set it for "
            "clients behind a load balancer that sends no PROXY header."
        ),
    )
    max_unauthenticated_connections_per_address: int = Field(
        default=1_000,
        ge=0,
        description=(
            "The number of connections from one IP address whose clients are unknown: the broker has not authenticated "
            "them, or, without an `[upstream.sasl]`, their first request is not complete. At this limit, and at those "
            "above, one such connection gives way to a new one. 0 means no limit."
        ),
    )
    max_request_bytes: PositiveBytes = Field(
        default=100 * MIB,
        validation_alias="socket.request.max.bytes",
        description="The maximum size of a request, as on a broker.",
    )
    max_decoded_bytes: PositiveBytes = Field(
        default=128 * MIB,
        validation_alias="held.messages.max.bytes",
        description=(
            "The memory for large messages, and as much again for all responses with remote records together, until "
            "the clients have received them: one connection gets at most 1/32 of that, and at least 256 KiB. Of the "
            "memory for large messages, a quarter is for requests while they arrive, a quarter for decoded requests "
            "until they are answered, and half for responses until the clients have received them. A decoded "
            "message counts 25 times its size, and another response twice its size. A message that counts at most 256 "
            "KiB needs none of this memory. A larger one waits until there is room. A message that needs more than an "
            "eighth of its quarter or half waits for other messages of this kind, and for no smaller ones. While a "
            "message waits, the proxy closes a client that takes longer than 5 s to send a request or to receive 256 "
            "KiB. It also closes a client whose request has been in progress for 30 s. Raise the setting if honest "
            "clients are closed with the cause `stalled`."
        ),
    )
    remote_fetch_max_bytes_per_second: PositiveBytes | None = Field(
        default=None,
        description=("The quota for the reads from the remote tier by the clients with one client id."),
    )
    drain_timeout_ms: PositiveMs = Field(
        default=30_000,
        description="How long the proxy waits for requests in progress when it stops.",
    )


class TracingConfig(Section):
    """Traces of the Fetches that need the remote tier, for a collector of OpenTelemetry (OTLP over HTTP). They need the
    extra `otel`. Their settings are OpenTelemetry's own environment variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.
    "Traces" in docs/day-to-day.md describes them, and the spans.
    """

    enabled: bool = Field(default=False, description="Whether the proxy sends traces.")


class TidegateConfig(TierConfig):
    """All settings of a proxy."""

    listener: Annotated[tuple[ListenerConfig, ...], ONE_OR_MORE] = Field(
        default=(ListenerConfig(),), min_length=1, description="The listeners. `[listener]` is a list of one."
    )
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    tracing: TracingConfig = TracingConfig()
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description=(
            "The number of processes that serve clients and share the ports; 0 means one. With a remote tier, one "
            "more process copies and writes the metadata, and another one reads the remote tier for all workers, so "
            "that no backfill delays the other clients. `max.connections*` and the memory for held responses are "
            "divided evenly among the workers."
        ),
    )

    @model_validator(mode="after")
    def _check_ports(self) -> TidegateConfig:
        if any(self.admin.port == each.bootstrap_port for each in self.listener):
            raise ValueError(f"admin.port and listener.bootstrap.port are both {self.admin.port}: change one of them")
        names = [each.name for each in self.listener]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two listeners have {twice}: change host or bootstrap.port of one of them")
        return self

    @property
    def worker_count(self) -> int:
        return max(1, self.workers)


def load_config(path: Path) -> TidegateConfig:
    """Reads and validates a file. Raises `ConfigError`."""
    return load_config_file(path, TidegateConfig)
