"""`OwnRights`: the rights at the brokers that the proxy lacks, found at the start and after each change of the topics.

One process of a proxy checks them: the one that runs the RLM tasks.
"""

from __future__ import annotations

import asyncio
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


class OwnRights:
    """The missing rights as of the last check are alarms of the process. At the start, an essential one ends it."""

    def __init__(self, client: BrokerClient, live: LiveSettings, alarms: ProcessAlarms) -> None:
        self._client = client
        self._live = live
        self._alarms = alarms
        self._missing: Sequence[str] = ()
        self._checked_topics = live.config.topics

    async def open(self, stack: AsyncExitStack) -> None:
        """Checks the rights now, and follows the settings until the stack closes.

        Raises `RemoteTierError` if an essential right is missing. Logs other missing rights, and a failure to read
        them."""
        config = self._live.config
        try:
            essential, others = await missing_permissions(self._client, config, TIMEOUT_MS)
        except BrokerError as error:
            logger.warning("the proxy's own rights cannot be read: %s", error)
        else:
            if essential:
                raise RemoteTierError(f"{principal_of(config)} lacks {'; '.join(essential)}")
            self._found(config, others)
        self._alarms.watch(ProcessAlarm.MISSING_RIGHT, lambda: self._missing)
        self._checked_topics = config.topics
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        check: asyncio.Task[None] | None = None

        def follow(config: TidegateConfig) -> None:
            nonlocal check
            if config.topics != self._checked_topics:
                self._checked_topics = config.topics
                stop()  # the answer to an earlier check would be one about other topics
                check = tasks.create_task(self._check_again(config))

        def stop() -> None:
            if check is not None:
                check.cancel()

        stack.callback(stop)
        self._live.follow(stack, follow)

    async def _check_again(self, config: TidegateConfig) -> None:
        try:
            essential, others = await missing_permissions(self._client, config, TIMEOUT_MS)
        except Exception as error:  # the copying goes on
            logger.warning("the proxy's own rights cannot be read: %s", error, exc_info=True)
        else:
            self._found(config, [*essential, *others])

    def _found(self, config: TidegateConfig, missing: Sequence[str]) -> None:
        principal = principal_of(config)
        for right in missing:
            logger.error("%s lacks %s", principal, right)
        self._missing = [f"{principal} lacks {right}" for right in missing]
