"""The changes that workers make to the metadata, by the remote-log process (`MetadataChangeServer`).

That process follows the metadata and knows its end, so it makes the changes of all processes of a proxy. While it does
not run, a worker gets an error that its client retries. If an answer is missing, the change may have been made; the
client's retry makes it again. A change ends with the time that its caller waits: the client may make another one after
that.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from uuid import UUID

from tiers.broker.client import monotonic_ms
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.changes import CheckTierConfig, MetadataChanges
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.reader.shared.channel import Acceptor, Address, Channel, connect
from tiers.reader.shared.lent_reads import sendable

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 10_000
"""How long a worker waits for an answer, if its caller does not say. The remote-log process has shorter deadlines."""


class Ask(NamedTuple):
    """Asks for a call of `MetadataChanges`, until `deadline_ms` (monotonic). The answer has the same number."""

    number: int
    deadline_ms: int
    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class Done(NamedTuple):
    number: int
    error: Exception | None


class MetadataChangeServer:
    """An asynchronous context manager: it serves until it exits. The caller owns `listener`, and closes it later."""

    def __init__(self, listener: socket.socket, changes: MetadataChanges) -> None:
        self._changes = changes
        self._channels: set[Channel] = set()
        self._group = asyncio.TaskGroup()
        self._changing: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(listener, "a change of the metadata", self._serve)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._acceptor.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._acceptor.close()
        for channel in self._channels:
            channel.close()
        for change in self._changing:
            change.cancel()
        await self._group.__aexit__(None, None, None)

    def _serve(self, peer: socket.socket) -> None:
        def on_message(ask: Ask, fds: list[int]) -> None:
            change = self._group.create_task(self._answer(channel, ask))
            self._changing.add(change)
            change.add_done_callback(self._changing.discard)

        channel = Channel(peer, on_message, lambda: self._channels.discard(channel), lambda: None)
        self._channels.add(channel)

    async def _answer(self, channel: Channel, ask: Ask) -> None:
        try:
            left_ms = ask.deadline_ms - monotonic_ms()
            if left_ms <= 0:  # it waited for the start of this process, and its client was told to try again
                return
            async with asyncio.timeout(left_ms / 1000):
                await getattr(self._changes, ask.method)(*ask.arguments, **ask.options)
            error: Exception | None = None
        except TimeoutError:
            return
        except Exception as raised:  # also from the check of the change, which the worker knows, or a defect
            error = sendable(raised)
        channel.send(Done(ask.number, error))


class RemoteMetadataChanges:
    """Implements `MetadataChanges` by a `MetadataChangeServer` of another process. `address` is its listener's name."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel: Channel | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}

    def close(self) -> None:
        self._on_lost()

    async def put_log_start(self, partition: TopicIdPartition, start: LogStart, timeout_ms: int | None = None) -> None:
        await self._ask("put_log_start", partition, start, timeout_ms, within_ms=timeout_ms)

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        await self._ask("put_topic_deletion", topic_id, topic, is_confirmed=is_confirmed)

    async def change_topic_tier_config(
        self, topic_id: UUID, topic: str, changes: Mapping[str, str | None], check: CheckTierConfig
    ) -> None:
        await self._ask("change_topic_tier_config", topic_id, topic, changes, check)

    async def _ask(self, method: str, *arguments: object, within_ms: int | None = None, **options: object) -> None:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        timeout_ms = _TIMEOUT_MS if within_ms is None else within_ms
        try:
            self._connected().send(Ask(number, monotonic_ms() + timeout_ms, method, arguments, options))
            async with asyncio.timeout(timeout_ms / 1000):
                await answer
        except OSError as error:
            raise RemoteLogMetadataNotReadyError(f"the remote-log process does not answer: {error}") from error
        finally:
            del self._asked[number]

    def _connected(self) -> Channel:
        """Raises `OSError`."""
        if self._channel is None:
            self._channel = Channel(connect(self._address), self._on_message, self._on_lost, self._on_lost)
        return self._channel

    def _on_message(self, done: Done, fds: list[int]) -> None:
        answer = self._asked.get(done.number)
        if answer is None or answer.done():
            return
        if done.error is None:
            answer.set_result(None)
        else:
            answer.set_exception(done.error)

    def _on_lost(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the remote-log process ended"))
