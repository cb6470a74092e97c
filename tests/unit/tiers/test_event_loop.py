"""Look-ups that hang hold up neither a connection to an address nor another name."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.support.fakes.hanging_names import HANGING, KNOWN, hanging_names
from tiers.event_loop import MAX_LOOK_UPS, EventLoop
from tiers.sockets import connected_socket


@pytest.mark.parametrize(("host", "look_ups"), [("127.0.0.1", 0), (KNOWN, 1)])
def test_a_connection_waits_for_no_look_up_of_another_name(host: str, look_ups: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with hanging_names() as names, socket.create_server(("127.0.0.1", 0)) as listener:
            hanging = [loop.create_task(connected_socket(f"{n}.{HANGING}", 9092)) for n in range(MAX_LOOK_UPS - 1)]
            await names.hang(len(hanging))
            for _ in range(2):
                (await connected_socket(host, listener.getsockname()[1])).close()
            assert names.look_ups[host] == look_ups
            for each in hanging:
                each.cancel()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(asyncio.wait_for(main(), 60))
