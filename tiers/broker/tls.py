"""`TlsContext`: an SSL context made of certificate files, which are read again when they change.

* Every new connection uses the current context. Open connections of clients keep theirs. The proxy's own connections
  are opened again when the context changes (`BrokerClient`).
* If changed files are unusable, an error is logged once, and the last usable context stays.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_INTERVAL_MS = 1_000

_PLAIN_TEXT = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"})


class TlsError(Exception):
    """Certificates or keys are unusable. The message is one line and names the setting and the file."""


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class TlsContext:
    """An SSL context. `build` makes it from `files`, and raises `TlsError`; so does the constructor.

    `name` is the section of the settings, for messages."""

    def __init__(
        self,
        name: str,
        build: Callable[[], ssl.SSLContext],
        files: Sequence[Path],
        clock_ms: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._name = name
        self._build = build
        self._files = tuple(files)
        self._clock_ms = clock_ms
        self._stamps = [*map(_stamp, self._files)]
        self._checked_at_ms = clock_ms()
        try:
            self._context = build()
        except TlsError as error:
            raise TlsError(f"{name} {error}") from error
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the changed files cannot be used; empty while the present ones are in use. Checks the files too.

        So an alarm begins and ends without a connection."""
        self.current()
        return self._trouble

    def current(self) -> ssl.SSLContext:
        """Returns the current context. Checks the files for changes at most once a second."""
        if self._clock_ms() - self._checked_at_ms >= CHECK_INTERVAL_MS:
            self._checked_at_ms = self._clock_ms()
            self._refresh()
        return self._context

    def _refresh(self) -> None:
        # The stamps are read before the files. So a change between the two reads is noticed the next time.
        stamps = [*map(_stamp, self._files)]
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._context = self._build()
        except TlsError as error:
            self._trouble = f"{self._name} {error}"
            logger.error("changed certificates cannot be used, the old ones stay: %s", error, extra={"of": self._name})
        else:
            self._trouble = ""
            logger.info("changed certificates are in use", extra={"of": self._name})


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def client_context(
    ca: Path | None, certificate: Path | None, key: Path | None, key_password: str | None, *, verifies_host_name: bool
) -> ssl.SSLContext:
    """Returns a context for connections to brokers. Without `ca` it trusts the system's authorities.

    Raises `TlsError`.
    """
    context = ssl.create_default_context()
    if ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "ca", ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = verifies_host_name
    if certificate is not None:
        load_certificate(context, certificate, key, key_password)
    return context


def load_authorities(context: ssl.SSLContext, key: str, ca: Path) -> None:
    """Loads the trusted authorities from the file that the setting `key` names. Raises `TlsError`."""
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise TlsError(f"{key}: {ca}: {_reason(error, 'holds no certificate in PEM form')}") from error


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None, password: str | None) -> None:
    """Loads a certificate and its key. If `key` is None, the certificate's file has the key. Raises `TlsError`."""
    try:
        # The callback prevents OpenSSL's prompt for a password: a service has no terminal.
        context.load_cert_chain(certificate, key, password=lambda: password or "")
    except (OSError, ValueError) as error:
        for name, file in (("certificate", certificate), ("key", key or certificate)):
            try:
                file.read_bytes()
            except OSError as unreadable:
                raise TlsError(f"{name}: {file}: {unreadable.strerror}") from unreadable
        problem = "the files hold no certificate and key in PEM form, or the key's password is wrong"
        raise TlsError(f"certificate: {certificate}, key: {key or certificate}: {_reason(error, problem)}") from error


def _reason(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        return "the key does not match the certificate" if error.reason == "KEY_VALUES_MISMATCH" else otherwise
    return getattr(error, "strerror", None) or otherwise


def is_plain_text(error: OSError) -> bool:
    """Returns whether a handshake failed because the peer does not speak TLS."""
    return isinstance(error, ssl.SSLError) and error.reason in _PLAIN_TEXT


def explain(error: Exception) -> str:
    """Returns why a connection failed, without OpenSSL's references to its source code."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case ssl.SSLError() if is_plain_text(error):
            return "it does not speak TLS"
        case ssl.SSLError(reason=str(reason)):
            return f"the TLS handshake failed: {reason.replace('_', ' ').lower()}"
        case ssl.SSLError():
            return "it closed the TLS connection"  # its `errno` is a code of OpenSSL
        case socket.gaierror(strerror=str(reason)):
            return reason
        case OSError(errno=int(number)) if number > 0:
            # The text of asyncio repeats the address, as in "[Errno 111] Connect call failed ('127.0.0.1', 9092)".
            return os.strerror(number)
    return str(error) or "timed out"


def setting_to_change(error: ssl.SSLError) -> str:
    """Returns the setting to check after a connection to a broker failed with this error."""
    if is_plain_text(error):
        return "remove [upstream.tls], or name the broker's TLS port"
    if isinstance(error, ssl.SSLCertVerificationError):
        # X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
        return "see [upstream.tls] verify.host.name" if error.verify_code in (62, 64) else "see [upstream.tls] ca"
    return "see [upstream.tls] certificate" if "ALERT" in (error.reason or "") else "see [upstream.tls]"
