"""`OwnRights`: the rights at the brokers that the proxy lacks.

One process of a proxy checks them: the one that runs the RLM tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from proxy.cluster.permissions import missing_permissions, principal_of
from proxy.config import TidegateConfig
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms
from proxy.process.live_settings import LiveSettings
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError

logger = logging.getLogger(__name__)

TIMEOUT_MS = 10_000
AGAIN_AFTER_S = 60.0
"""An operator who gives a right sees the alarm end soon."""


class OwnRights:
    """The missing rights as of the last check are alarms of the process. At the start, an essential one ends it."""

    def __init__(self, client: BrokerClient, live: LiveSettings, alarms: ProcessAlarms) -> None:
        self._client = client
        self._live = live
        self._alarms = alarms
        self._missing: Sequence[str] = ()
        self._is_known = False
        """Whether the last check read the rights."""
        self._checked_topics = live.config.topics

    async def open(self, stack: AsyncExitStack) -> None:
        """Checks the rights now, and checks them again until the stack closes.

        Raises `RemoteTierError` if an essential right is missing. Logs other missing rights, and a failure to read
        them."""
        await self._check(is_start=True)
        principal = principal_of(self._live.config)
        self._alarms.watch(ProcessAlarm.MISSING_RIGHT, lambda: [f"{principal} lacks {each}" for each in self._missing])
        topics_changed = asyncio.Event()

        def follow(config: TidegateConfig) -> None:
            if config.topics != self._checked_topics:
                topics_changed.set()

        self._live.follow(stack, follow)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(tasks.create_task(self._keep_checking(topics_changed)).cancel)

    async def _keep_checking(self, topics_changed: asyncio.Event) -> None:
        """Checks again after each change of the topics, and every minute until no right is missing."""
        while True:
            has_all = self._is_known and not self._missing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if has_all else AGAIN_AFTER_S):
                    await topics_changed.wait()
            topics_changed.clear()
            try:
                await self._check(is_start=False)
            except Exception as error:  # the copying goes on
                logger.warning("the proxy's own rights cannot be read: %s", error, exc_info=True)

    async def _check(self, *, is_start: bool) -> None:
        config = self._live.config
        self._checked_topics = config.topics
        principal = principal_of(config)
        try:
            essential, others = await missing_permissions(self._client, config, TIMEOUT_MS)
        except BrokerError as error:
            if self._is_known or is_start:
                logger.warning("the proxy's own rights cannot be read: %s", error)
            self._is_known = False
            return
        if is_start and essential:
            raise RemoteTierError(f"{principal} lacks {'; '.join(essential)}")
        missing = [*essential, *others]
        for right in missing:
            if right not in self._missing:
                logger.error("%s lacks %s", principal, right)
        self._missing, self._is_known = missing, True
