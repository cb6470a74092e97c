"""Builds the TLS context for clients from the settings. Unusable settings end the start."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from proxy.config import ListenerTlsConfig
from tiers.broker.tls import TlsContext, load_authorities, load_certificate
from tiers.config.upstream_config import CertificateConfig


def listener_tls(config: ListenerTlsConfig | None) -> TlsContext | None:
    """Returns the TLS context for clients. None means plain text. Raises `TlsError`."""
    if config is None:
        return None

    def build() -> ssl.SSLContext:
        context = _server_context(config, config)
        if config.certificates:
            by_name = {
                name: made
                for each in config.certificates
                for made in [_server_context(config, each)]
                for name in each.names
            }
            context.sni_callback = _ByName(by_name)
        return context

    identities: list[CertificateConfig] = [config, *config.certificates]
    files = [file for each in identities for file in (each.certificate, each.key)]
    return TlsContext("the listener", build, _files(*files, config.client_ca))


def _server_context(config: ListenerTlsConfig, identity: CertificateConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, identity.certificate, identity.key, _plain(identity.key_password))
    if config.client_ca is not None:
        # Every context needs this, because OpenSSL verifies a client's certificate with the context that SNI selects.
        load_authorities(context, config.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if config.client_auth == "required" else ssl.CERT_OPTIONAL
        # A resumed session skips the verification, so it would admit a client whose authority is no longer trusted.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


class _ByName:
    """Switches a handshake to the context of the host name that the client sent (SNI), if there is one."""

    def __init__(self, contexts: Mapping[str, ssl.SSLContext]) -> None:
        self._contexts = contexts

    def __call__(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        name = (name or "").lower().rstrip(".")
        found = self._contexts.get(name) or self._contexts.get(f"*.{name.partition('.')[2]}")
        if found is not None:
            handshake.context = found


def _files(*files: Path | None) -> list[Path]:
    return [file for file in files if file is not None]


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
