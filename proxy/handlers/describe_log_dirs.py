"""Handles DescribeLogDirs: shows the remote tier as one more log directory (docs/semantics.md 9.6).

Tools that show the size of topics ask every broker for all of its partitions. The proxy adds the directory to such an
answer alone, with the partitions that the broker leads, so that the sum over all brokers has each partition once. A
request that names partitions is relayed: kafka-reassign-partitions takes every directory in the answer for a disk. On
the bootstrap port, the proxy does not know which broker answers, so it adds nothing there.

The broker authorizes: if it refuses the request, its answer stays as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from protocol.api_keys import ApiKey, check_version
from protocol.apis.log_dirs import PartitionSizes, asks_for_all, granted_log_dirs, with_log_dir
from proxy.handlers.turns import in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Respond

COUNT_TIMEOUT_MS = 5_000
"""How long an answer waits for the sizes. The client's later requests on the same connection wait, too."""


class DescribeLogDirsHandler:
    """Implements `Handler`. `led_by` is `RemoteSizes.led_by`, and `path` is the name of the directory."""

    def __init__(self, led_by: Callable[[int, int], Awaitable[PartitionSizes]], path: str) -> None:
        self._led_by = led_by
        self._path = path

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        request, node_id = exchange.request, exchange.node_id
        check_version(ApiKey.DESCRIBE_LOG_DIRS, request.api_version)
        if node_id is None or not asks_for_all(request.frame):
            return Forward(request.frame), None
        return Forward(request.frame, hold_bytes=None), partial(self._complete, request.api_version, node_id)

    async def _complete(self, version: int, node_id: int, payload: memoryview) -> Buffers:
        dirs = await in_turns(granted_log_dirs.steps(payload, version))
        if dirs is None:
            return (payload,)
        sizes = await self._led_by(node_id, COUNT_TIMEOUT_MS)
        if not sizes:
            return (payload,)
        return (await in_turns(with_log_dir.steps(payload, version, dirs, self._path, sizes)),)
