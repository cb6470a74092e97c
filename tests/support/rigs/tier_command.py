"""Runs `tidegate tier ...` as a process, or any command within this process, which is faster."""

from __future__ import annotations

import asyncio
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from proxy import cli
from tests.support.rigs.waiting import TIMEOUT_S

Answer = tuple[int, str, str]
"""The exit code, the standard output and the standard error."""


async def as_process(config: Path, *arguments: str) -> Answer:
    command = [sys.executable, "-m", "proxy", "tier", *arguments, "--config", str(config)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def run(config: Path, *arguments: str) -> Answer:
    return await tidegate_here(config, "tier", *arguments)


async def tidegate_here(config: Path, *arguments: str) -> Answer:
    """Runs any command in this process, with longer timeouts. Its log goes to the log of the test run."""
    out, err = StringIO(), StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch("proxy.commands.tier.tools.set_up_logging"),
        patch("tiers.access.open_tier.TIMEOUT_MS", int(1000 * TIMEOUT_S)),
        patch("proxy.commands.tier.bounds.TIMEOUT_MS", int(1000 * TIMEOUT_S)),
    ):
        code = await asyncio.to_thread(cli.run, [*arguments, "--config", str(config)])
    return code, out.getvalue(), err.getvalue()
