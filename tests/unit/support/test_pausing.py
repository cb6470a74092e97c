"""A paused process stands still when the call returns, with all its threads and children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.pausing import pause_group, pause_process

PROGRAM = """
import os, threading, time
def work():
    while True:
        time.sleep(0.0005)
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def states(pid: int) -> set[str]:
    files = Path(f"/proc/{pid}/task").glob("*/stat")
    return {file.read_text().rpartition(")")[2].split()[0] for file in files}


def test_every_thread_stands_still(busy: subprocess.Popen[str]) -> None:
    assert busy.stdout is not None
    child = int(busy.stdout.readline())
    for _ in range(20):
        pause_process(busy.pid)
        assert states(busy.pid) == {"T"}
        os.kill(busy.pid, signal.SIGCONT)
    assert states(child) != {"T"}
    pause_group(busy.pid)
    assert (states(busy.pid), states(child)) == ({"T"}, {"T"})
