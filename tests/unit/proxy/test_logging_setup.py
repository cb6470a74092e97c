"""One line per event, in both forms; an exception belongs to its event."""

from __future__ import annotations

import io
import json
import logging

from proxy.logging_setup import set_up_logging


def test_json_lines_carry_the_keys_of_the_event() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", stream)
    log = logging.getLogger("tidegate.test")
    log.info("connection %s", "refused", extra={"connection_id": 7, "node_id": None})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    log.debug("not said")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert {**first, "time": ""} == {
        "time": "",
        "level": "info",
        "logger": "tidegate.test",
        "message": "connection refused",
        "connection_id": 7,
    }
    assert "ValueError: why" in second["exception"]


def test_text_lines_name_the_keys() -> None:
    stream = io.StringIO()
    set_up_logging("warning", "text", stream)
    log = logging.getLogger("tidegate.test")
    log.info("not said")
    log.warning("refused", extra={"client": "127.0.0.1:1"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING tidegate.test: refused client=127.0.0.1:1")
