"""The proxy's tests run on the loop that the proxy runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.marks import full
from tests.support.proxy import proxy_harness
from tests.support.proxy.proxy_harness import RELAYS
from tiers.event_loop import EventLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": EventLoop}


@pytest.fixture(scope="module", params=["spliced", *full("copied", "by the loop")])
def every_relay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the tests of a module with every way to relay. `make test` splices all: other modules copy small answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy_harness, "relay", RELAYS[request.param])
        yield
