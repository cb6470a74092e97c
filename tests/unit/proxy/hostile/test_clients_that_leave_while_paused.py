"""The proxy notices that a client has left also while it does not read from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.wire import server
from tests.support.fakes.broker.wire import Wire, request
from tests.support.proxy.proxy_harness import PATIENT, PreparingHandler, relayed

pytestmark = pytest.mark.usefixtures("every_relay")

HELD = 41
LEAVING: dict[str, tuple[Callable[[Wire], None], str]] = {
    "reset": (Wire.reset, "client"),
    "half-closed": (Wire.half_close, "half_closed"),
}


@pytest.mark.parametrize("how", LEAVING)
async def test_a_client_that_left_is_noticed_while_its_requests_wait(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOKS_S", 0.01)
    leave, cause = LEAVING[how]
    handler = PreparingHandler(b"")
    limits = PATIENT.model_copy(update={"half_close_timeout_ms": 1})
    async with relayed(handlers={HELD: handler}, limits=limits) as (client, _, proxy):
        await client.send(request(HELD, 1, 7), request(HELD, 1, 8))
        await handler.asked.wait()
        (connection,) = proxy.server.connections
        assert connection.paused_fd is not None
        leave(client)
        await proxy.closed_by(cause)
