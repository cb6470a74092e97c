"""The violations that the drill finds in the metrics of the proxies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.drill.proxy_watch import ProxyWatch
from tests.drill.violations import BOUNDS, Violations
from tests.support.tiers.tier_model_records import PARTITION
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.metrics import RemoteLogManagerMetrics

EXPLAINED = {AlarmReason.GAP, AlarmReason.COPY_STALLED, AlarmReason.STAGE_FAILING}
"""Some alarms that a killed process or a store that is gone may begin."""
UNEXPLAINED = {AlarmReason.CUT, AlarmReason.CUSTOM_METADATA, AlarmReason.DIVERGED, AlarmReason.METADATA_LOST}


@pytest.mark.parametrize("reason", sorted(EXPLAINED | UNEXPLAINED))
def test_an_alarm_that_no_fault_explains_is_noticed(reason: AlarmReason) -> None:
    registry, violations = CollectorRegistry(), Violations()
    metrics = RemoteLogManagerMetrics(registry)
    process = SimpleNamespace(metrics=lambda timeout_s: generate_latest(registry).decode())
    proxy: Any = SimpleNamespace(number=1, name="proxy 1", process=process)
    rig: Any = SimpleNamespace(proxies=[proxy])
    watch = ProxyWatch(rig, violations)
    metrics.add(PARTITION)
    watch._ask(proxy)
    assert violations.total == 0
    metrics.alarms.happened(PARTITION.topic, reason)
    watch._ask(proxy)
    assert violations.count == ({BOUNDS: 1} if reason in UNEXPLAINED else {})
