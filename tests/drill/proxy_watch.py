"""`ProxyWatch` reads the proxies' metrics: the owners of metadata partitions, and counters that must stay zero.

A metadata partition has no owner while no answering proxy tells that it may write. That may last at most `owner_back_s`
after the last proxy or broker went away or came back. A proxy that is too busy to answer may be the owner, also for at
most `owner_back_s`.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from http.client import HTTPException

from bench.offsets import EARLIEST, list_offsets
from tests.drill.acknowledged_records import Place
from tests.drill.rig import METADATA_PARTITIONS, DrillProxy, DrillRig
from tests.drill.violations import BOUNDS, LOG_START, OWNER, Violations
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.metrics import RemoteLogManagerMetrics

OWNER_BACK_S = 15.0
_INTERVAL_S = 0.25
_OWNED = re.compile(r'^tidegate_remote_log_metadata_owned\{[^}]*metadata_partition="(\d+)"[^}]*\} 1\.0$', re.MULTILINE)
_BROKEN_BOUNDS = re.compile(r"^tidegate_bounds_violations_total\{([^}]*)\} ([1-9][\d.]*)$", re.MULTILINE)
_NEVER = (AlarmReason.CUT, AlarmReason.CUSTOM_METADATA, AlarmReason.DIVERGED, AlarmReason.METADATA_LOST)
"""The alarms that no fault of a drill explains. `TierModel` judges the gaps: clients delete records, too."""
_NAME = RemoteLogManagerMetrics.alarm_counter.exposed_name
_ALARMS = re.compile(
    rf'^{_NAME}\{{([^}}]*reason="(?:{"|".join(_NEVER)})"[^}}]*)\}} ([1-9][\d.]*)$',
    re.MULTILINE,
)


class ProxyWatch:
    """Call `run` in its own thread. It ends after `stop`."""

    def __init__(self, rig: DrillRig, violations: Violations, owner_back_s: float = OWNER_BACK_S) -> None:
        self._owner_back_s = owner_back_s
        self._rig = rig
        self._violations = violations
        self._stopping = threading.Event()
        now_s = time.monotonic()
        self._owned_at_s = dict.fromkeys(range(METADATA_PARTITIONS), now_s)
        self._starts: dict[tuple[int, Place], int] = {}
        self.longest_s = dict.fromkeys(range(METADATA_PARTITIONS), 0.0)
        """The longest time without an owner, by metadata partition. It may contain several disruptions."""
        self.longest_quiet_s = dict.fromkeys(range(METADATA_PARTITIONS), 0.0)
        """The longest time without an owner since the last disruption, by metadata partition."""
        self._said_at_s: dict[int, float] = {}
        """When each proxy last told its partitions, by the proxy's number."""
        self.is_all_owned = False
        """Whether every metadata partition had an owner at the last look."""
        self.looks = 0
        self.error: str | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self.error = f"the watch of the proxies ended: {error!r}"
            raise

    def _watch(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            owned: set[int] = set()
            is_one_busy = False
            for proxy in self._rig.surviving():
                said = self._ask(proxy)
                now_s = time.monotonic()
                if said is not None:
                    owned |= said
                    self._said_at_s[proxy.number] = now_s
                else:
                    since_s = max(self._said_at_s.get(proxy.number, 0.0), self._rig.disrupted_at_s)
                    is_one_busy = is_one_busy or now_s - since_s <= self._owner_back_s
            self._note(owned, time.monotonic(), is_one_busy=is_one_busy)
            self.looks += 1

    def _ask(self, proxy: DrillProxy) -> set[int] | None:
        """Returns the metadata partitions that a proxy owns. None: the proxy does not answer."""
        try:
            text = proxy.process.metrics(timeout_s=5.0)
            if self.looks % 8 == proxy.number % 8:
                self._check_log_starts(proxy)
        except (OSError, HTTPException, ValueError, struct.error):  # the proxy is stopping or starting
            return None
        for labels, _ in _BROKEN_BOUNDS.findall(text):
            self._violations.add(BOUNDS, f"{proxy.name}: {labels}")
        for labels, _ in _ALARMS.findall(text):
            self._violations.add(BOUNDS, f"{proxy.name}: an alarm: {labels}")
        return {int(number) for number in _OWNED.findall(text)}

    def _note(self, owned: set[int], now_s: float, *, is_one_busy: bool) -> None:
        self.is_all_owned = owned >= self._owned_at_s.keys()
        for number in self._owned_at_s:
            gone_s = now_s - self._owned_at_s[number]
            quiet_s = min(gone_s, now_s - self._rig.disrupted_at_s)
            self.longest_s[number] = max(self.longest_s[number], gone_s)
            self.longest_quiet_s[number] = max(self.longest_quiet_s[number], quiet_s)
            if number in owned:
                self._owned_at_s[number] = now_s
            elif quiet_s > self._owner_back_s and not is_one_busy:
                since = f"{self._owned_at_s[number]:.0f}"
                self._violations.add(OWNER, f"metadata partition {number}: no owner since {since} (monotonic)")

    def _check_log_starts(self, proxy: DrillProxy) -> None:
        for topic in self._rig.topics.names:
            asked = range(self._rig.topics.partitions)
            for partition, start in list_offsets(proxy.process.address, topic, asked, EARLIEST, 5.0).items():
                of = proxy.number, (topic, partition)
                before = self._starts.get(of, 0)
                self._starts[of] = max(before, start)
                if start < before:
                    self._violations.add(LOG_START, f"{of[1]} through {proxy.name}: {start} after {before}")
