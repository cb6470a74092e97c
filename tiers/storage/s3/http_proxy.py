"""The HTTP proxy on the way to a store, as the environment names it: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`.

The client library follows the same variables for all other requests, so a store takes copies if and only if it can be
read. A request to a store without TLS goes to the proxy itself. A connection with TLS leads through a tunnel (CONNECT,
RFC 9110 9.3.6).
"""

from __future__ import annotations

import asyncio
import base64
import socket
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from botocore.httpsession import ProxyConfiguration
from botocore.utils import get_environ_proxies

from tiers.storage.s3.answer_head import HEAD_END, MalformedAnswerError, parse_head

_MAX_HEAD_BYTES: Final = 16 << 10
_DEFAULT_PORT: Final = 80


class ProxyRefusedError(OSError):
    """The HTTP proxy does not connect to the store. It may do so later."""


class HttpProxy(NamedTuple):
    """`credentials` is the value of Proxy-Authorization, or empty."""

    host: str
    port: int
    credentials: str = ""

    def header(self) -> str:
        """Returns the field of the credentials with its line end. Empty without credentials."""
        return f"Proxy-Authorization: {self.credentials}\r\n" if self.credentials else ""


def proxy_of(url: str) -> HttpProxy | None:
    """Returns the proxy for requests to `url`. None: they go to the store directly.

    Raises `ProxyRefusedError` for a proxy that is reached in another way than by plain HTTP."""
    named = ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url)
    if not named:
        return None
    parts = urlsplit(named)
    # botocore puts `http://` before an address with a scheme that it does not know.
    if parts.scheme != "http" or not parts.hostname or "//" in parts.path:
        raise ProxyRefusedError("the HTTP proxy that the environment names for the store must begin with `http://`")
    credentials = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        credentials = f"Basic {base64.b64encode(pair.encode()).decode()}"
    return HttpProxy(parts.hostname, parts.port or _DEFAULT_PORT, credentials)


async def open_tunnel(opened: socket.socket, proxy: HttpProxy, host: str, port: int) -> None:
    """Lets the proxy connect `opened`, a socket to it, to the host. Raises `ProxyRefusedError` and `OSError`."""
    loop = asyncio.get_running_loop()
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{proxy.header()}\r\n"
    await loop.sock_sendall(opened, request.encode("ascii"))
    where = f"the HTTP proxy {proxy.host}:{proxy.port}"
    head = b""
    while HEAD_END not in head:
        if len(head) > _MAX_HEAD_BYTES:
            raise ProxyRefusedError(f"{where} answers CONNECT with more than {_MAX_HEAD_BYTES} bytes")
        received = await loop.sock_recv(opened, _MAX_HEAD_BYTES)
        if not received:
            raise ConnectionResetError(f"{where} closed the connection before it answered CONNECT")
        head += received
    try:
        status = parse_head(head[: head.index(HEAD_END)]).status
    except MalformedAnswerError as error:
        raise ProxyRefusedError(f"{where} answers CONNECT with no answer of HTTP: {error}") from error
    if not 200 <= status < 300:
        advice = ": put the user and the password into the address of the proxy" if status == 407 else ""
        raise ProxyRefusedError(f"{where} answers CONNECT to {target} with {status}{advice}")
    if not head.endswith(HEAD_END):  # a store sends nothing before the handshake
        raise ProxyRefusedError(f"{where} sends bytes behind its answer to CONNECT")
