"""A hostile client writes a bounded number of log lines, and the metrics count everything."""

from __future__ import annotations

import logging

import pytest

from proxy.wire.connection_log import LINES, WINDOW_MS, ConnectionLog, loggable
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, frame
from tests.support.proxy.proxy_harness import proxy_before

ATTEMPTS = LINES + 10


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


def test_a_client_id_stays_on_its_line() -> None:
    assert loggable("a\nWARNING forged\x1b[2J") == "a?WARNING forged?[2J"
    assert len(loggable("x" * 32_000)) == 64
