"""`off_loop`: decodes large messages in a thread, so that one client's message holds up no other connection.

The event loop decodes up to `LOOP_BYTES` of a message at a time, which takes milliseconds for the smallest items. There
is one thread for all larger messages: several would share the interpreter with the event loop, and slow it down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

LOOP_BYTES: Final = 4 * 1024

_decoder = ThreadPoolExecutor(1, thread_name_prefix="decoder")

T = TypeVar("T")


async def off_loop(size_bytes: int, decode: Callable[[], T]) -> T:
    """Returns `decode()`. It runs in the thread if the message is large, so it must not change shared state."""
    if size_bytes <= LOOP_BYTES:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(_decoder, decode)
