"""Logs the error that ends a connection in one line, with the remedy if it is known."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from protocol.errors import ProtocolError, TlsHandshakeError


def log_failure(logger: logging.Logger, peer: str, error: Exception, who: Mapping[str, object]) -> None:
    """`peer` is the sender of the faulty bytes: "client" or "broker"."""
    match error:
        case TlsHandshakeError() if peer == "broker":
            logger.warning("closing the connection: the broker speaks TLS: set [upstream.tls]", extra=who)
        case TlsHandshakeError():
            logger.warning(
                "a client speaks TLS on this plain-text port: set security.protocol=PLAINTEXT (or SASL_PLAINTEXT) "
                "in the client, or give the proxy a certificate ([listener.tls])",
                extra=who,
            )
        case ProtocolError():
            logger.warning("closing the connection: the %s sent %s", peer, error, extra=who)
        case _:
            logger.error("closing the connection: a request handler failed", exc_info=error, extra=who)
