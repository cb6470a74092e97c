"""The connections to the store work on the loop that the proxy runs on, and on asyncio's own, which the jobs use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tiers.event_loop import EventLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": EventLoop, "asyncio": asyncio.new_event_loop}
