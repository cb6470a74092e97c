"""The settings of the cluster behind the proxy, and a client made of them."""

from __future__ import annotations

import ipaddress
import re
import ssl
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from tiers.broker.client import DEFAULT_REQUEST_TIMEOUT_MS, BrokerClient
from tiers.broker.metadata_reads import Address
from tiers.broker.sasl import Mechanism, SaslCredentials
from tiers.broker.tls import TlsContext, client_context
from tiers.config.settings import PositiveMs, Section

_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST_NAME = re.compile(rf"({_LABEL}\.)*{_LABEL}")


def check_host(value: str) -> str:
    """Raises `ValueError` for anything but a host name or an IP address."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        # A resolver also accepts other forms of an address, for example 0x7f.0.0.1.
        name = value.lower().removesuffix(".")
        if _HOST_NAME.fullmatch(name) is None or name.replace(".", "").isdecimal():
            wanted = "is not a host name or an IP address: write it without a scheme and without a port"
            raise ValueError(f"{value!r} {wanted}") from None
    return value


Host = Annotated[str, AfterValidator(check_host)]


def _address(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, _, port = value.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"expected host:port, not {value!r}")
    return check_host(host.strip("[]")), int(port)


def _addresses(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


HostAndPort = Annotated[Address, BeforeValidator(_address)]


class CertificateConfig(Section):
    certificate: Path = Field(description="The file with the certificate and its chain.")
    key: Path | None = Field(
        default=None, description="The file with the private key; by default the certificate's file."
    )
    key_password: SecretStr | None = Field(
        default=None, validation_alias="password", description="The password of an encrypted key."
    )


class UpstreamTlsConfig(Section):
    """TLS to the brokers, for the connections of clients and for the proxy's own. Without this section, connections to
    the brokers are plain text. Files are in PEM format; the proxy reads them again when they change. If the brokers do
    not require SASL, every client has the rights of the proxy's own certificate.
    """

    ca: Path | None = Field(
        default=None,
        description=(
            "The file with the authorities that sign the brokers' certificates; by default the system's authorities."
        ),
    )
    verify_host_name: bool = Field(
        default=True,
        description="Whether a broker's certificate must name the broker's address.",
    )
    certificate: Path | None = Field(
        default=None, description="The proxy's own certificate, for brokers that require one."
    )
    key: Path | None = Field(
        default=None, description="The file with its private key; by default the certificate's file."
    )
    key_password: SecretStr | None = Field(
        default=None, validation_alias="password", description="The password of an encrypted key."
    )

    @model_validator(mode="after")
    def _check_key(self) -> UpstreamTlsConfig:
        if self.key is not None and self.certificate is None:
            raise ValueError("there is a key without a certificate: set certificate")
        return self


class UpstreamSaslConfig(Section):
    """The proxy's own credentials, which it uses to copy, to trim and to write metadata. Clients have their own
    credentials, which the proxy passes through.
    """

    mechanism: Mechanism = Field(description="`PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512` or `OAUTHBEARER`.")
    username: str | None = Field(
        default=None, min_length=1, description="The user name, for all mechanisms except `OAUTHBEARER`."
    )
    password: SecretStr | None = Field(
        default=None, description="The password, for all mechanisms except `OAUTHBEARER`."
    )
    token_file: Path | None = Field(
        default=None,
        description="For `OAUTHBEARER`: the file with the token. The proxy reads it for every authentication.",
    )

    @model_validator(mode="after")
    def _check_credentials(self) -> UpstreamSaslConfig:
        if self.mechanism == "OAUTHBEARER":
            if self.token_file is None or self.username is not None or self.password is not None:
                raise ValueError("OAUTHBEARER takes token.file, and neither username nor password")
        elif self.token_file is not None or self.username is None or self.password is None:
            raise ValueError(f"{self.mechanism} takes username and password, and no token.file")
        return self

    def credentials(self) -> SaslCredentials:
        """Returns the credentials with the password in plain text. Only for the broker client."""
        password = "" if self.password is None else self.password.get_secret_value()
        return SaslCredentials(self.mechanism, self.username or "", password, self.token_file)


class UpstreamConfig(Section):
    """The cluster behind the proxy."""

    bootstrap_servers: Annotated[tuple[HostAndPort, ...], BeforeValidator(_addresses)] = Field(
        min_length=1,
        description="The first brokers to contact, as in a Kafka client.",
    )
    metadata_max_age_ms: PositiveMs = Field(
        default=5_000,
        description="How often the proxy asks for the brokers, and for the topics that clients use.",
    )
    request_timeout_ms: PositiveMs = Field(
        default=DEFAULT_REQUEST_TIMEOUT_MS,
        description="The deadline of the proxy's own requests to brokers.",
    )
    tls: UpstreamTlsConfig | None = None
    sasl: UpstreamSaslConfig | None = None


def broker_client(config: UpstreamConfig, client_id: str = "tidegate") -> BrokerClient:
    """Returns a client of the cluster, not yet open. Raises `TlsError`."""
    return BrokerClient(
        config.bootstrap_servers,
        client_id=client_id,
        tls=upstream_tls(config),
        credentials=None if config.sasl is None else config.sasl.credentials(),
        request_timeout_ms=config.request_timeout_ms,
    )


def upstream_tls(config: UpstreamConfig) -> TlsContext | None:
    """Returns the TLS context for connections to brokers; None for plain text. Raises `TlsError`."""
    tls = config.tls
    if tls is None:
        return None

    def build() -> ssl.SSLContext:
        return client_context(
            tls.ca,
            tls.certificate,
            tls.key,
            _plain(tls.key_password),
            verifies_host_name=tls.verify_host_name,
        )

    return TlsContext(
        "[upstream.tls]", build, [file for file in (tls.ca, tls.certificate, tls.key) if file is not None]
    )


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
