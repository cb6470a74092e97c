"""The settings of TLS as contexts, one for clients and one for brokers. What cannot be used ends the start."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import SecretStr

from proxy.config import ListenerTlsConfig, UpstreamConfig
from tiers.broker.tls import TlsContext, client_context, load_authorities, load_certificate


def listener_tls(config: ListenerTlsConfig | None) -> TlsContext | None:
    """None: plain text. Raises `TlsError`."""
    if config is None:
        return None

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_certificate(context, config.certificate, config.key, _plain(config.key_password))
        if config.client_ca is not None:
            load_authorities(context, config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED if config.client_auth == "required" else ssl.CERT_OPTIONAL
            # A resumed session would let in whom an authority that is trusted no more had signed.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    return TlsContext("the listener", build, _files(config.certificate, config.key, config.client_ca))


def upstream_tls(config: UpstreamConfig) -> TlsContext | None:
    """None: plain text. Raises `TlsError`."""
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

    return TlsContext("the connections to brokers", build, _files(tls.ca, tls.certificate, tls.key))


def _files(*files: Path | None) -> list[Path]:
    return [file for file in files if file is not None]


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
