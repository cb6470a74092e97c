"""A test that hangs fails, and its report shows where it hung. The run goes on, unless a call blocks its event loop."""

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
BLOCKS = """
import asyncio
import os
import pytest
from tests.support import hanging_tests

hanging_tests.AGAIN_S = 0.2
pytestmark = pytest.mark.timeout(1)

async def wait_for_another():
    os.read(os.pipe()[0], 1)

def test_that_blocks_its_loop():
    asyncio.run(wait_for_another())
"""


def run_of(test: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "test_hangs.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "tests.support.hanging_tests", str(folder / "test_hangs.py")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_a_hanging_test_fails_where_it_hangs(tmp_path: Path) -> None:
    run = run_of(HANGS, tmp_path)
    assert "3 failed, 1 passed" in run.stdout
    assert run.stdout.count("The test ran for longer than 1 s.") >= 3
    assert run.stdout.count("await asyncio.Event().wait()") >= 2
    assert "time.sleep(3600)" in run.stdout


def test_the_process_ends_if_a_call_blocks_its_event_loop(tmp_path: Path) -> None:
    run = run_of(BLOCKS, tmp_path)
    assert run.returncode == 1
    assert "in wait_for_another" in run.stderr
