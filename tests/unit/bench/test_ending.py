"""A bench that is terminated stops its servers and cleans up."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from bench.ending import run
def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        print("stopped")
run(main)
"""


def test_a_terminated_bench_cleans_up_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "stopped\n", "")
