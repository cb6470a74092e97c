"""The proxy's tests run on the loop that the proxy runs on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def root_logger_as_it_was() -> Iterator[None]:
    """For tests of what sets logging up: levels and handlers of every logger are put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: each.level for name in root.manager.loggerDict if (each := logging.getLogger(name)).level}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in root.manager.loggerDict:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
