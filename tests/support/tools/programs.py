"""promtool and helm: programs that check what is in `deploy/`. `make test-all` builds them into `.cache/bin`.

The binaries are `$TIDEGATE_PROMTOOL` and `$TIDEGATE_HELM`, or those in `.cache/bin` if these are not set.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.servers.jars import CACHE, ROOT

TIMEOUT_S = 120.0


def program(name: str) -> Path:
    path = Path(os.environ.get(f"TIDEGATE_{name.upper()}") or CACHE / "bin" / name)
    if not os.access(path, os.X_OK):
        pytest.fail(f"{path} is missing: run make .cache/bin/{name} (golang-go installs Go)", pytrace=False)
    return path


def run(name: str, *arguments: str) -> str:
    """Runs the program at the root of the repository, and returns its output. Raises `AssertionError` if it fails."""
    done = subprocess.run(
        [str(program(name)), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
