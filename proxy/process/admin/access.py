"""`AdminAccess`: who may read the pages of the admin port, and its TLS.

`/livez`, `/servez` and `/readyz` are open to everybody, because process managers and load balancers ask them. The other
pages ask for a token or for a client certificate, if the settings have one. Both count, if the settings have both.
Programs send the token as a bearer token, and browsers as the password of any user.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from aiohttp import web

from proxy.config import AdminConfig, AdminTlsConfig
from proxy.process.admin.process_alarms import ProcessAlarm, Troubles, troubles_of
from tiers.broker.tls import TlsContext, load_authorities, load_certificate, monotonic_ms
from tiers.config.tier_config import ConfigError

logger = logging.getLogger(__name__)

CHECK_INTERVAL_MS = 1_000
_BEARER, _BASIC = "Bearer ", "Basic "


class AdminTokenError(ConfigError):
    """The file with the token is unusable."""


class TokenFile:
    """A token that is read again when its file changes. If the changed file is unusable, the last token stays."""

    def __init__(self, path: Path, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        """Raises `AdminTokenError`."""
        self._path = path
        self._clock_ms = clock_ms
        self._stamp = self._read_stamp()
        self._token = self._read()
        self._checked_at_ms = clock_ms()
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why the changed file cannot be used; empty while its token is the one that counts. Looks at the file too.

        So an alarm begins and ends without a request to the port."""
        self.current()
        return self._trouble

    def current(self) -> str:
        """Looks at the file at most once a second."""
        now_ms = self._clock_ms()
        if now_ms - self._checked_at_ms >= CHECK_INTERVAL_MS:
            self._checked_at_ms = now_ms
            # The stamp is read before the file. So a change between the two reads is noticed the next time.
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._token = self._read()
                    self._trouble = ""
                    logger.info("the changed token of the admin port is in use")
                except AdminTokenError as error:
                    self._trouble = str(error)
                    logger.error("the changed token of the admin port cannot be used, the old one stays: %s", error)
        return self._token

    def _read(self) -> str:
        at = f"[admin] token.file: {self._path}"
        try:
            token = self._path.read_bytes().decode("ascii", errors="replace").strip()
        except OSError as error:
            raise AdminTokenError(f"{at}: {error.strerror or error}") from None
        if not token:
            raise AdminTokenError(f"{at}: there is no token in it")
        if not (token.isascii() and token.isprintable()):
            raise AdminTokenError(f"{at}: a token is one line of printable ASCII characters")
        return token

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class AdminAccess:
    """`token` returns the token that counts now. Without it and without `needs_certificate`, everybody may read."""

    def __init__(
        self,
        token: Callable[[], str] | None = None,
        tls: TlsContext | None = None,
        *,
        needs_certificate: bool = False,
        troubles: Mapping[ProcessAlarm, Troubles] | None = None,
    ) -> None:
        """`troubles` are those of the files that the settings name."""
        self.troubles = troubles or {}
        self._token = token
        self.tls = tls
        self._needs_certificate = needs_certificate

    def refusal(self, request: web.Request) -> web.Response | None:
        """Returns the answer to a request that may not read the pages; None if it may."""
        if self._token is None and not self._needs_certificate:
            if _names_this_machine(request.host):
                return None
            return web.Response(status=403, text="the host of the request is no loopback address\n")
        if self._allows(request):
            return None
        # A browser asks for a password when it sees Basic.
        answer = web.Response(status=401, text="unauthorized\n", headers={"WWW-Authenticate": "Bearer"})
        answer.headers.add("WWW-Authenticate", 'Basic realm="Tidegate", charset="UTF-8"')
        return answer

    def refusal_of_change(self, request: web.Request) -> web.Response | None:
        """Returns the answer to a request that may not change anything; None if it may.

        Only a bearer token counts: a browser sends a password or a certificate by itself, also for a page of a
        stranger."""
        if self._token is None:
            return web.Response(
                status=403, text="a change needs the token: set token.file in [admin], or send SIGHUP to reload\n"
            )
        header = request.headers.get("Authorization", "")
        if header.startswith(_BEARER) and self._has_token(header):
            return None
        return web.Response(
            status=401, text="a change needs the bearer token\n", headers={"WWW-Authenticate": "Bearer"}
        )

    def _allows(self, request: web.Request) -> bool:
        if self._needs_certificate and request.get_extra_info("peercert"):
            return True  # the TLS handshake has verified it
        return self._has_token(request.headers.get("Authorization", ""))

    def _has_token(self, header: str) -> bool:
        said = _token_in(header)
        # The comparison takes the same time whatever the client sends.
        return self._token is not None and said is not None and hmac.compare_digest(said, self._token().encode())


def _token_in(header: str) -> bytes | None:
    """Returns the token that a request names: a bearer token, or the password of a browser's user."""
    if header.startswith(_BEARER):
        return header.removeprefix(_BEARER).strip().encode(errors="replace")
    if header.startswith(_BASIC):
        try:
            return base64.b64decode(header.removeprefix(_BASIC).strip(), validate=True).partition(b":")[2]
        except ValueError:
            return None
    return None


def _names_this_machine(host: str) -> bool:
    """Whether a request names an address or `localhost`.

    A page of a stranger may let its own name point to the loopback address. The browser then reads this port for that
    page, and names the stranger's host."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


OPEN_TO_ALL = AdminAccess()


def admin_access(config: AdminConfig) -> AdminAccess:
    """Returns what the settings say. Raises `AdminTokenError` and `TlsError`."""
    token = None if config.token_file is None else TokenFile(config.token_file)
    certificates = None if config.tls is None else _certificates(config.tls)
    return AdminAccess(
        None if token is None else token.current,
        certificates,
        needs_certificate=config.tls is not None and config.tls.client_ca is not None,
        troubles={
            ProcessAlarm.ADMIN_TOKEN_UNUSABLE: partial(troubles_of, token),
            ProcessAlarm.CERTIFICATES_UNUSABLE: partial(troubles_of, certificates),
        },
    )


def _certificates(config: AdminTlsConfig) -> TlsContext:
    """Raises `TlsError`."""

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        password = None if config.key_password is None else config.key_password.get_secret_value()
        load_certificate(context, config.certificate, config.key, password)
        if config.client_ca is not None:
            load_authorities(context, "client.ca", config.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL  # the open pages need no certificate
        return context

    files = [file for file in (config.certificate, config.key, config.client_ca) if file is not None]
    return TlsContext("[admin.tls]", build, files)
