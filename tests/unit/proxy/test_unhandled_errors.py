"""Errors that no code handles are lines of the log, of a bounded number, whoever causes them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import uvloop

from proxy.logging_setup import set_up_logging
from proxy.process.start.unhandled_errors import unhandled_errors_logged
from proxy.wire.connection_log import LINES, WINDOW_MS
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire
from tests.support.proxy.proxy_harness import proxy_before
from tests.support.proxy.tls_sides import for_clients
from tests.support.servers.certificates import Authority

ATTEMPTS = LINES + 10


class Log:
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.now_ms = 0

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log(capfd: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """Checks in the end that nothing went to standard error around the log."""
    log = Log()
    handlers = logging.getLogger().handlers[:]
    set_up_logging("info", "json", log.stream)
    try:
        with unhandled_errors_logged(lambda: log.now_ms):
            yield log
    finally:
        logging.getLogger().handlers[:] = handlers
    assert capfd.readouterr().err == ""


class Undead:
    def __del__(self) -> None:
        raise ValueError("not destroyed")


def destroy() -> None:
    Undead()


def end_a_thread() -> None:
    def fail() -> None:
        raise ValueError("no thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def warn() -> None:
    warnings.warn("a warning", stacklevel=2)


def fail_in(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def fail() -> None:
        def callback() -> None:
            raise ValueError("no callback")

        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(fail())


@pytest.mark.parametrize(
    "cause",
    [destroy, end_a_thread, warn, lambda: fail_in(asyncio.new_event_loop), lambda: fail_in(uvloop.new_event_loop)],
    ids=["object", "thread", "warning", "asyncio", "uvloop"],
)
@pytest.mark.filterwarnings("always")
def test_each_kind_has_some_lines_a_minute(cause: Callable[[], None], log: Log) -> None:
    for _ in range(ATTEMPTS):
        cause()
    assert len(log.lines) == LINES
    log.now_ms += WINDOW_MS
    cause()
    assert log.lines[-1]["lines_left_out"] == ATTEMPTS - LINES


async def test_a_host_name_outside_of_ascii_is_a_line_without_a_traceback(
    log: Log, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    async with FakeBroker() as broker, proxy_before(broker, tls=for_clients(authority)) as proxy:
        for _ in range(ATTEMPTS):
            wire = Wire(*await asyncio.open_connection("127.0.0.1", proxy.port))
            await wire.send_raw(client_hello("k\u00e4fka.example".encode()))
            await wire.ended()
            await wire.close()
        await proxy.closed_by("tls_handshake", ATTEMPTS)
    named = [line for line in log.lines if str(line["message"]).startswith("a client named a host outside of ASCII")]
    assert len(named) == LINES
    assert all("exception" not in line for line in log.lines)


def client_hello(server_name: bytes) -> bytes:
    """A hello of TLS 1.2 whose only extension is the host name."""

    def sized(content: bytes, size_bytes: int) -> bytes:
        return len(content).to_bytes(size_bytes, "big") + content

    name = sized(b"\0" + sized(server_name, 2), 2)
    extensions = sized(b"\0\0" + sized(name, 2), 2)
    hello = b"\3\3" + bytes(32) + b"\0" + sized(b"\xc0\x2f\xc0\x30", 2) + b"\1\0" + extensions
    return b"\x16\3\1" + sized(b"\1" + sized(hello, 3), 2)
