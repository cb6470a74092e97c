"""Builds the TLS context for clients from the settings. Unusable settings end the start.

The handshake notes the host name that the client sends (SNI). The name selects the certificate, and may select the
broker.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from proxy.listener_config import ListenerTlsConfig
from tiers.broker.tls import TlsContext, load_authorities, load_certificate
from tiers.config.upstream_config import CertificateConfig


def listener_tls(config: ListenerTlsConfig | None) -> TlsContext | None:
    """Returns the TLS context for clients. None means plain text. Raises `TlsError`."""
    if config is None:
        return None

    def build() -> ssl.SSLContext:
        context = _server_context(config, config)
        context.sni_callback = _ByName(
            {
                name: made
                for each in config.certificates
                for made in [_server_context(config, each)]
                for name in each.names
            }
        )
        return context

    identities: list[CertificateConfig] = [config, *config.certificates]
    files = [file for each in identities for file in (each.certificate, each.key)]
    return TlsContext("[listener.tls]", build, _files(*files, config.client_ca))


def _server_context(config: ListenerTlsConfig, identity: CertificateConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class = _Handshake
    load_certificate(context, identity.certificate, identity.key, _plain(identity.key_password))
    if config.client_ca is not None:
        # Every context needs this, because OpenSSL verifies a client's certificate with the context that SNI selects.
        load_authorities(context, "client.ca", config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if config.client_auth == "required" else ssl.CERT_OPTIONAL
        # A resumed session skips the verification, so it would admit a client whose authority is no longer trusted.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


class _Handshake(ssl.SSLObject):
    server_name: str | None = None
    """The host name that the client sent, in lower case and without a dot at its end."""


def named_host(transport: asyncio.BaseTransport) -> str | None:
    """Returns the host name that the client sent in its TLS handshake. None: it sent none, or speaks plain text."""
    handshake = transport.get_extra_info("ssl_object")
    return handshake.server_name if isinstance(handshake, _Handshake) else None


class _ByName:
    """Notes the host name of a handshake, and switches the handshake to the context of that name, if there is one."""

    def __init__(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        self._contexts = contexts

    def __call__(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        name = (name or "").lower().rstrip(".")
        if isinstance(handshake, _Handshake):
            handshake.server_name = name or None
        found = self._contexts.get(name) or self._contexts.get(f"*.{name.partition('.')[2]}")
        if found is not None:
            handshake.context = found


def _files(*files: Path | None) -> list[Path]:
    return [file for file in files if file is not None]


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
