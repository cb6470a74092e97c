"""`TidegateConfig`: the one TOML file as a proxy reads it, its own sections included."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from proxy.limits_config import LimitsConfig
from tiers.config import Section
from tiers.tier_config import TierConfig, load_config_file, parse_config_text
from tiers.upstream_config import CertificateConfig

_HOST_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def _host_names(value: object) -> object:
    names = [name.lower().rstrip(".") for name in value if isinstance(name, str)] if isinstance(value, list) else []
    for name in names:
        if not _HOST_NAME.fullmatch(name) or name.rpartition(".")[2].isdecimal():
            raise ValueError(f"{name!r} is no host name; `*` may stand for the first label alone")
    return names or value


class ListenerCertificateConfig(CertificateConfig):
    """One more certificate for the same ports: for clients that name one of these hosts in the TLS handshake (SNI). Who
    names none, or another one, is shown the certificate of `[listener.tls]`.
    """

    names: Annotated[tuple[str, ...], BeforeValidator(_host_names)] = Field(
        min_length=1, description="Host names; `*.example.org` is every name of one more label. The exact one wins."
    )


class ListenerTlsConfig(CertificateConfig):
    """TLS of the client's side; without this section it is plain text. Files are in PEM form, and are read again when
    they change. A client's certificate lets it in and says nothing to the brokers: they know clients by SASL alone.
    """

    subsections = frozenset({"certificates"})

    client_ca: Path | None = Field(None, alias="client.ca", description="Who signs the certificates of clients.")
    client_auth: Literal["none", "requested", "required"] = Field(
        "none",
        alias="client.auth",
        description="Whether clients show a certificate; `requested`: only one that is wrong is turned away.",
    )
    certificates: tuple[ListenerCertificateConfig, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> ListenerTlsConfig:
        names = [name for each in self.certificates for name in each.names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice} has two certificates")
        return self

    @model_validator(mode="after")
    def _check_client_auth(self) -> ListenerTlsConfig:
        if (self.client_auth == "none") != (self.client_ca is None):
            raise ValueError("client.auth and client.ca go together: who must show a certificate, and signed by whom")
        return self


class ListenerConfig(Section):
    """What clients connect to: one port to bootstrap from, and one per broker at base port + node id."""

    subsections = frozenset({"tls"})

    host: str = Field("0.0.0.0", min_length=1, description="The address to bind.")
    advertised_host: str = Field(
        "localhost", alias="advertised.host", min_length=1, description="The host name that clients are told."
    )
    bootstrap_port: int = Field(
        9092, alias="bootstrap.port", gt=0, lt=65_536, description="The port that clients are configured with."
    )
    base_port: int = Field(
        9100, alias="base.port", gt=0, lt=65_536, description="Broker N is reached at this port + N."
    )
    reuse_port: bool = Field(
        False,
        alias="reuse.port",
        description="Bind with SO_REUSEPORT, so that several processes share the ports; workers always do.",
    )
    tls: ListenerTlsConfig | None = None


class AdminConfig(Section):
    """`/metrics`, `/livez` and `/readyz`. With workers they speak for all processes: ready is when each of them is, and
    every series has the label `process`.
    """

    host: str = Field("127.0.0.1", min_length=1, description="The address to bind.")
    port: int = Field(9190, ge=0, lt=65_536, description="0 turns the admin port off.")


class LogConfig(Section):
    """What the process says of itself, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least important to write.")
    format: Literal["text", "json"] = Field("text", description="For people, or one JSON object per line.")


class TidegateConfig(TierConfig):
    """The whole file of a proxy."""

    section_models: ClassVar[Mapping[str, type[BaseModel]]] = {
        **TierConfig.section_models,
        "listener": ListenerConfig,
        "listener.tls": ListenerTlsConfig,
        "listener.tls.certificates": ListenerCertificateConfig,
        "admin": AdminConfig,
        "log": LogConfig,
        "limits": LimitsConfig,
    }

    listener: ListenerConfig = Field(default_factory=ListenerConfig.defaults)
    admin: AdminConfig = Field(default_factory=AdminConfig.defaults)
    log: LogConfig = Field(default_factory=LogConfig.defaults)
    limits: LimitsConfig = Field(default_factory=LimitsConfig.defaults)
    workers: int = Field(
        0,
        ge=0,
        le=1024,
        description=(
            "Proxy processes that share the ports, beside one that copies and keeps the metadata; budgets and "
            "`max.connections*` are divided evenly among them. 0: one process does everything."
        ),
    )


def load_config(path: Path) -> TidegateConfig:
    """Raises `ConfigError`."""
    return load_config_file(path, TidegateConfig)


def parse_config(text: str, name: str = "configuration") -> TidegateConfig:
    """Raises `ConfigError`."""
    return parse_config_text(text, TidegateConfig, name)
