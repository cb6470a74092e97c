"""`BrokerConnection`: one connection to a broker, which pipelines requests and matches responses in order.

* A broker answers in request order (docs/semantics.md 1.4). Another correlation id than that of the oldest request ends
  the connection. A request that its caller abandoned keeps its place in the order; its response is dropped.
* When a connection is lost, all its requests fail with a retriable `BrokerError`. The object is never reopened.
* Before the end of a SASL session, the connection authenticates again, before its next request (KIP-368). A broker
  checks the end of a session only when it receives a request, so an idle connection needs no timer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse

from protocol.errors import ErrorCode
from protocol.frame import begins_http
from protocol.primitives import INT32, skip_tagged_section
from tiers.broker.sasl import SaslCredentials, authenticate
from tiers.broker.tls import explain, setting_to_change
from tiers.errors import BrokerError, BrokerRefusedError
from tiers.sockets import connected_socket

MAX_RESPONSE_BYTES = 128 * 1024 * 1024
_API_VERSIONS_KEY = 18
_SASL_AUTHENTICATE_KEY = 36
_SESSION_USED_PERCENT = 85
"""The usable part of a session's lifetime. The rest allows for differing clocks and for the requests in progress."""
_TLS_ALERT = 0x1503
"""The first two bytes of a TLS listener's answer to plain text."""


def unchecked() -> None:
    """Lets a request leave without a check: the default of `before_sending`."""


class _Pending(NamedTuple):
    correlation_id: int
    response: asyncio.Future[memoryview]


class BrokerConnection(asyncio.BufferedProtocol):
    def __init__(
        self, address: str, client_id: str, clock_ms: Callable[[], int], credentials: SaslCredentials | None = None
    ) -> None:
        self.address = address
        self.api_versions: dict[int, tuple[int, int]] = {}
        self._client_id = client_id
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._pending: deque[_Pending] = deque()
        self._last_correlation_id = 0
        self._last_received_ms = clock_ms()
        self._length = memoryview(bytearray(4))
        self._buffer = self._length
        self._filled = 0
        self._credentials = credentials
        self._refused: str | None = None
        """The reason why the TLS settings do not match the broker's; None when there is no such reason."""
        self._is_retired = False
        self._was_answered = False
        """Whether the broker has answered a request after the negotiation."""
        self._authentication = asyncio.Lock()
        self._authenticate_at_ms: int | None = None

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        client_id: str,
        clock_ms: Callable[[], int],
        timeout_ms: int,
        ssl_context: ssl.SSLContext | None = None,
        credentials: SaslCredentials | None = None,
    ) -> BrokerConnection:
        """Opens a connection, negotiates the API versions and authenticates.

        Raises `BrokerError` when this fails or passes the deadline, and `BrokerRefusedError` when TLS or SASL fails.
        """
        address = f"{host}:{port}"
        connection = cls(address, client_id, clock_ms, credentials)
        is_usable = False
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                try:
                    sock = await connected_socket(host, port)
                    name = None if ssl_context is None else host
                    await asyncio.get_running_loop().create_connection(
                        lambda: connection, sock=sock, ssl=ssl_context, server_hostname=name
                    )
                except OSError:  # an error of the certificate is a `ValueError` too
                    raise
                except ValueError as error:
                    raise BrokerError(f"{address} is no address: {error}", retriable=True) from error
                await connection._negotiate(timeout_ms)
                await connection._authenticate(timeout_ms)
                is_usable = True
        except TimeoutError as error:
            raise BrokerError(f"{address} did not accept a connection in {timeout_ms} ms", retriable=True) from error
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                raise BrokerRefusedError(f"{address}: {explain(error)}: {setting_to_change(error)}") from error
            # A broker without TLS closes the connection, just as a broker that shuts down does.
            is_unsure = ssl_context is not None and isinstance(error, ConnectionResetError | ConnectionAbortedError)
            said = explain(error)
            if is_unsure:
                said = "it closed the TLS handshake: see [upstream.tls], does it speak TLS?"
            raise BrokerError(f"{address} is not reachable: {said}", retriable=True) from error
        finally:
            if not is_usable:
                # An opening that is cancelled ends here too. With TLS, the loop itself would first wait for the broker.
                connection.abort("the connection was not negotiated")
        return connection

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    async def request(
        self, message: Any, version: int, timeout_ms: int, before_sending: Callable[[], None] = unchecked
    ) -> memoryview:
        """Sends kafka-python's `message` in that version and returns the response's body, without its header.

        `before_sending` is called after an authentication that is due. If it raises an exception, nothing is sent.

        The caller owns the body. After `timeout_ms` it raises a retriable `BrokerError`. If the broker sent nothing
        during that time, it counts as dead, and the connection ends."""
        began_at_ms = self._clock_ms()
        if self._authentication.locked() or self._is_session_over():
            try:
                async with asyncio.timeout(timeout_ms / 1000), self._authentication:
                    if self._is_session_over():
                        await self._authenticate(timeout_ms)
            except TimeoutError as error:
                raise BrokerError(f"{self.address} did not authenticate in {timeout_ms} ms", retriable=True) from error
        before_sending()
        return await self._send(message, version, max(1, timeout_ms - (self._clock_ms() - began_at_ms)))

    def _is_session_over(self) -> bool:
        return self._authenticate_at_ms is not None and self._clock_ms() >= self._authenticate_at_ms

    async def _authenticate(self, timeout_ms: int) -> None:
        """Authenticates, if there are credentials. If that fails or is cancelled, the connection ends."""
        if self._credentials is None:
            return
        began_at_ms = self._clock_ms()
        is_done = False
        try:
            lifetime_ms = await authenticate(
                self._credentials,
                lambda message, version: self._send(message, version, timeout_ms),
                self.api_versions.get(_SASL_AUTHENTICATE_KEY, (0, 0)),
            )
            is_done = True
        except BrokerRefusedError as error:
            raise BrokerRefusedError(f"{self.address}: {error}", error.code) from error
        finally:
            if not is_done:
                self.abort("authentication failed")
        usable_ms = lifetime_ms * _SESSION_USED_PERCENT // 100
        self._authenticate_at_ms = began_at_ms + usable_ms if lifetime_ms else None

    async def _send(self, message: Any, version: int, timeout_ms: int) -> memoryview:
        if self._transport is None or self.is_closed:
            raise BrokerError(f"the connection to {self.address} is closed", retriable=True)
        self._last_correlation_id = (self._last_correlation_id + 1) & 0x7FFFFFFF
        message.API_VERSION = version
        message.with_header(correlation_id=self._last_correlation_id, client_id=self._client_id)
        frame = message.encode(header=True, framed=True)
        pending = _Pending(self._last_correlation_id, self._loop.create_future())
        self._pending.append(pending)
        sent_at_ms = self._clock_ms()
        self._transport.write(frame)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                payload = await pending.response
        except TimeoutError as error:
            if self._last_received_ms <= sent_at_ms:
                self.abort(f"silent for {timeout_ms} ms")
            raise BrokerError(f"{self.address} did not answer in {timeout_ms} ms", retriable=True) from error
        position = 4
        if message.API_KEY != _API_VERSIONS_KEY and message.flexible_version_q(version):
            position = skip_tagged_section(payload, position)
        return payload[position:]

    async def _negotiate(self, timeout_ms: int) -> None:
        version = int(ApiVersionsRequest.max_version)
        while True:
            message = ApiVersionsRequest(client_software_name="tidegate", client_software_version="1")
            body = await self._send(message, version, timeout_ms)
            try:
                response = ApiVersionsResponse.decode(body, version=version)
            except Exception as error:  # for malformed bytes the decoder raises exceptions of many types
                raise BrokerError(f"{self.address}: a response to ApiVersions cannot be read: {error!r}") from error
            ranges = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
            if response.error_code == ErrorCode.NONE:
                self.api_versions = ranges
                return
            if response.error_code != ErrorCode.UNSUPPORTED_VERSION or version == 0:
                raise BrokerError(f"{self.address} refused the ApiVersions request", response.error_code)
            known = ranges.get(_API_VERSIONS_KEY, (0, 0))[1]
            version = known if known < version else 0

    def abort(self, reason: str) -> None:
        """Ends the connection now. Requests in progress fail. Safe to call twice."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(reason)

    def retire(self) -> None:
        """Ends the connection after the requests in progress. The caller must send no more. Safe to call twice."""
        self._is_retired = True
        if not self._pending:
            self.abort("another connection took its place")

    async def close(self) -> None:
        """Ends the connection and waits until its transport is closed."""
        self.abort("the client closed the connection")
        if self._transport is not None:
            await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._last_received_ms = self._clock_ms()
        self._filled += nbytes
        if self._filled < len(self._buffer):
            return
        if self._buffer is self._length:
            size = INT32.unpack_from(self._length)[0]
            if not 4 <= size <= MAX_RESPONSE_BYTES:
                if size >> 16 == _TLS_ALERT:
                    self._refused = "speaks TLS: set [upstream.tls]"
                other = "HTTP?" if begins_http(size) else f"it announced a response of {size} bytes"
                self.abort(f"this is no Kafka port ({other})")
                return
            self._buffer = memoryview(bytearray(size))
        else:
            payload, self._buffer = self._buffer, self._length
            self._on_response(payload)
        self._filled = 0

    def _on_response(self, payload: memoryview) -> None:
        correlation_id = INT32.unpack_from(payload)[0]
        if not self._pending or self._pending[0].correlation_id != correlation_id:
            self.abort(f"answered request {correlation_id} out of order")
            return
        self._was_answered = bool(self.api_versions)
        response = self._pending.popleft().response
        if not response.done():
            response.set_result(payload)
        if self._is_retired:
            self.retire()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError):
            # In TLS 1.3 the broker checks the client's certificate after the client has finished the handshake.
            self._refused = f"{explain(exc)}: {setting_to_change(exc)}"
        said = "closed by the broker" if exc is None else str(exc)
        if self._credentials is None and self.api_versions and not self._was_answered:
            said += " before it answered a request: if the listener asks for SASL, set [upstream.sasl]"
        self._fail(said)
        if not self._closed.done():
            self._closed.set_result(None)

    def _fail(self, reason: str) -> None:
        pending, self._pending = self._pending, deque()
        for entry in pending:
            if not entry.response.done():
                if self._refused is not None:
                    entry.response.set_exception(BrokerRefusedError(f"{self.address}: {self._refused}"))
                else:
                    entry.response.set_exception(BrokerError(f"{self.address}: {reason}", retriable=True))
