"""A hostile client writes a bounded number of log lines, and the metrics count everything."""

from __future__ import annotations

import io
import logging

import pytest

from protocol.api_keys import ApiKey
from protocol.header import build_request_header
from proxy.logging_setup import set_up_logging
from proxy.wire.connection_log import LINES, WINDOW_MS, ConnectionLog
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.sasl import handshake
from tests.support.fakes.broker.wire import connected, frame
from tests.support.proxy.proxy_harness import proxy_before

ATTEMPTS = LINES + 10
LONG = "x\n" * 15_000


async def test_many_bad_connections_write_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeBroker() as broker, proxy_before(broker) as proxy:
        for _ in range(ATTEMPTS):
            async with connected(proxy.port) as client:
                await client.send_raw(frame(b"1234"))
                assert await client.ended() == b""
        assert await proxy.closed_by("protocol_error", ATTEMPTS) == {"protocol_error": ATTEMPTS}
    assert len(caplog.records) == LINES


def test_the_next_line_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_ms = 0
    log = ConnectionLog(logging.getLogger("test"), lambda: now_ms)
    for _ in range(LINES + 3):
        log.log(logging.WARNING, "one", "refused", {})
    log.log(logging.WARNING, "another", "refused", {})
    assert len(caplog.records) == LINES + 1
    now_ms = WINDOW_MS
    for _ in range(2):
        log.log(logging.WARNING, "one", "refused", {"client": "192.0.2.1:5"})
    told, after = caplog.records[-2:]
    assert told.__dict__["lines_left_out"] == 3
    assert "lines_left_out" not in after.__dict__


@pytest.mark.parametrize("form", ["text", "json"])
def test_names_of_clients_stay_on_their_line(form: str) -> None:
    """This holds for messages and for keys, whichever module logs them."""
    stream = io.StringIO()
    set_up_logging("info", form, stream)
    forged = "a\nWARNING forged\x1b[2J"
    logging.getLogger("tidegate.test").warning("refused %s", forged, extra={"topic": forged})
    logging.getLogger("tidegate.test").warning("x" * 32_000, extra={"client_id": "x" * 32_000})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "forged" in lines[0]
    assert len(lines[1]) < 2_500


@pytest.mark.parametrize(
    ("sent", "cut"),
    [
        (handshake(0, LONG), "reason"),
        (build_request_header(ApiKey.SASL_HANDSHAKE, 9, 1, LONG), "client_id"),
    ],
    ids=["mechanism", "client id"],
)
async def test_a_long_text_of_a_client_is_cut_in_the_error_log(sent: bytes, cut: str) -> None:
    async with FakeBroker() as broker, proxy_before(broker) as proxy, connected(proxy.port) as client:
        await client.send(sent)
        assert await client.ended() == b""
        (entry,) = proxy.server.errors.incidents
    shown = getattr(entry, cut)
    assert shown.isprintable()
    assert len(shown) < 2_500
