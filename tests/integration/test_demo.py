"""A small `make demo` works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.integration
def test_the_proxy_returns_every_record_that_left_the_broker() -> None:
    command = [sys.executable, "-m", "bench.demo", "--mib", "24"]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "the broker alone answers OFFSET_OUT_OF_RANGE for offset 0" in demo.stdout
    for client in ("confluent-kafka", "kafka-python"):
        assert f"{client}: all " in demo.stdout
