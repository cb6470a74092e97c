"""A short drill on real servers, and one more that must find a bug planted in the proxies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drill.engine import Drill, DrillSettings
from tests.drill.faults import Fault, FaultKind
from tests.drill.rig import DrillRig
from tests.drill.violations import READ, SEGMENT
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import delete_topic
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration

SEED = 1
OWNER_BACK_S = 30.0
"""Long enough for a machine that stalls for seconds, which ends a session or two. `make drill` has a strict limit."""
FAULTS = (
    Fault(4, FaultKind.PROXY_FREEZE, 0, 11),
    Fault(6, FaultKind.STORE_FREEZE, -1, 4),
    Fault(24, FaultKind.PROXY_KILL, 1, 2),
    Fault(25, FaultKind.STORE_KILL, -1, 3),
)


@contextmanager
def drill(
    kafka: KafkaCluster,
    s3: VersityGateway,
    home: Path,
    settings: DrillSettings,
    *,
    proxies: int = 2,
    command: str = "proxy",
) -> Iterator[Drill]:
    rig = DrillRig(kafka, s3, home, proxies=proxies, command=(command,))
    try:
        rig.start()
        yield Drill(rig, settings)
    finally:
        rig.stop()
        rig.remove_folders()
        for topic in rig.topics.names:
            delete_topic(kafka.bootstrap_servers, topic)


def test_two_proxies_survive_a_short_drill(kafka: KafkaCluster, s3: VersityGateway, tmp_path: Path) -> None:
    with drill(kafka, s3, tmp_path, DrillSettings(SEED, 40, faults=FAULTS, owner_back_s=OWNER_BACK_S)) as running:
        result = running.run()
    assert result.violations == []
    assert result.faults.total() == len(FAULTS)
    # Even a slow machine must do enough for a drill.
    assert result.checked > result.certain > 500
    assert result.trimmed_offsets > 100
    assert result.transactions > 20
    assert result.aborted > 0


def test_a_planted_bug_is_found(kafka: KafkaCluster, s3: VersityGateway, tmp_path: Path) -> None:
    settings = DrillSettings(SEED, 40, faults=(), stop_at_first=True, owner_back_s=OWNER_BACK_S)
    with drill(kafka, s3, tmp_path, settings, proxies=1, command="tests.drill.planted") as running:
        result = running.run()
    assert result.rules
    assert set(result.rules) <= {READ, SEGMENT}
