"""A test that hangs fails, and its report shows where it hung. The run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANGS = """
import asyncio
import time
import pytest
import uvloop

pytestmark = pytest.mark.timeout(1)

@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_in_a_loop(loop_factory):
    async def wait_for_nothing():
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(wait_for_nothing())

def test_in_a_thread():
    time.sleep(3600)

def test_that_ends():
    pass
"""


def test_a_hanging_test_fails_where_it_hangs(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.hanging_tests", str(tmp_path / "test_hangs.py")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "3 failed, 1 passed" in run.stdout
    assert run.stdout.count("The test ran for longer than 1 s.") >= 3
    assert run.stdout.count("await asyncio.Event().wait()") >= 2
    assert "time.sleep(3600)" in run.stdout
