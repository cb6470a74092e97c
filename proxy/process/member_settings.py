"""Finds the proxies of the cluster whose settings differ where they must not: an owner goes by its own file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

from proxy.process.live_settings import LiveSettings
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError
from tiers.metadata.topic.group.assignor import differing
from tiers.metadata.topic.group.group_members import OwnerMember, group_members

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
_TIMEOUT_MS = 10_000


def other_settings(own: str, members: Sequence[OwnerMember], own_name: str) -> Iterator[str]:
    """Yields a line for each member of the owners' group with other settings. `own` are those of `own_name`."""
    for member in members:
        if names := differing(own, member.settings):
            yield f"the proxy {member.name} has another {names} than {own_name}"


async def compare_members(client: BrokerClient, metadata_topic: str, live: LiveSettings, troubles: list[str]) -> None:
    """Keeps in `troubles` what two looks in a row have found: a reload of all proxies takes a while."""
    seen: list[str] = []
    while True:
        await asyncio.sleep(INTERVAL_S)
        with contextlib.suppress(BrokerError):
            members = await group_members(client, metadata_topic, _TIMEOUT_MS)
            if not any(each.settings for each in members):
                continue  # the group rebalances
            found = list(other_settings(live.config.shared_digests(), members, "this proxy"))
            for each in found:
                if each in seen and each not in troubles:
                    logger.error("two proxies of the cluster have different settings: %s", each)
            seen, troubles[:] = found, [each for each in found if each in seen]
