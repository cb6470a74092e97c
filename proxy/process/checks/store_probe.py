"""`StoreProbe` finds out in the background what the store guarantees to concurrent writers, and goes on doing so.

A probe is evidence, not a condition: a store that is down, or that guarantees nothing, ends no process. Servers change
behind one address, so the probe is repeated. A probe costs some 170 requests per store, so one without a result is
repeated ever more rarely.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from tiers.lasting_trouble import LastingTrouble
from tiers.metric_spec import GaugeSpec
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoreFeatures

logger = logging.getLogger(__name__)

_SINCE = "with the first probe that has a result"
ATOMIC_CREATION = GaugeSpec(
    "tidegate_remote_storage_atomic_creation",
    "1: by the last probe, one of several writers creates an object. 0: all of them do.",
    ("location",),
    since=_SINCE,
)

INTERVAL_S = 3600.0
RETRY_S = 60.0


class StoreProbe:
    def __init__(
        self,
        storage: RemoteStorageManager,
        registry: CollectorRegistry,
        clock_ms: Callable[[], int],
    ) -> None:
        self._atomic = ATOMIC_CREATION.metric(registry)
        self._storage = storage
        self._known: dict[str, StoreFeatures] = {}
        self._failing = LastingTrouble(
            logger,
            "the store cannot be probed: what was proved before still counts",
            "the store can be probed again",
            clock_ms=clock_ms,
        )

    async def run(self) -> None:
        """Probes until it is cancelled."""
        retry_s = RETRY_S
        while True:
            if await self.probe():
                retry_s = RETRY_S
                await asyncio.sleep(INTERVAL_S)
            else:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, INTERVAL_S)

    async def probe(self) -> bool:
        """Probes once. Returns whether the probe had a result."""
        try:
            found = await self._storage.probe()
        except Exception as error:  # a storage manager of a third party may raise anything
            self._failing.found(error=str(error) or repr(error))
            return False
        self._failing.ended()
        for features in found:
            self._note(features)
        return True

    def _note(self, features: StoreFeatures) -> None:
        location = features.location or "home"
        self._atomic.labels(location).set(int(features.has_atomic_creation))
        known = self._known.get(location)
        self._known[location] = features
        if known is not None and known.has_atomic_creation == features.has_atomic_creation:
            return
        fields = {
            "location": location,
            "atomic_creation": features.has_atomic_creation,
            "evidence": features.evidence,
        }
        if features.has_atomic_creation:
            logger.info("the store was probed by concurrent writers", extra=fields)
        else:
            logger.warning(
                "the store lets several writers create one object: tiering works, exports to it are refused",
                extra=fields,
            )
