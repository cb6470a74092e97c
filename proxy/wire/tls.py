"""Builds the TLS context for clients from the settings. Unusable settings end the start.

The handshake notes the host name that the client sends (SNI). The name may select the broker.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from pydantic import SecretStr

from proxy.listener_config import ListenerTlsConfig
from tiers.broker.tls import TlsContext, load_authorities, load_certificate


def listener_tls(config: ListenerTlsConfig | None) -> TlsContext | None:
    """Returns the TLS context for clients. None means plain text. Raises `TlsError`."""
    if config is None:
        return None

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslobject_class = _Handshake
        context.sni_callback = _note_name
        load_certificate(context, config.certificate, config.key, _plain(config.key_password))
        if config.client_ca is not None:
            load_authorities(context, "client.ca", config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED if config.client_auth == "required" else ssl.CERT_OPTIONAL
            # A resumed session skips the verification, so it would admit a client whose authority is not trusted now.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    return TlsContext("[listener.tls]", build, _files(config.certificate, config.key, config.client_ca))


class _Handshake(ssl.SSLObject):
    server_name: str | None = None
    """The host name that the client sent, in lower case and without a dot at its end."""


def named_host(transport: asyncio.BaseTransport) -> str | None:
    """Returns the host name that the client sent in its TLS handshake. None: it sent none, or speaks plain text."""
    handshake = transport.get_extra_info("ssl_object")
    return handshake.server_name if isinstance(handshake, _Handshake) else None


def _note_name(handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
    if isinstance(handshake, _Handshake):
        handshake.server_name = (name or "").lower().rstrip(".") or None


def _files(*files: Path | None) -> list[Path]:
    return [file for file in files if file is not None]


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
