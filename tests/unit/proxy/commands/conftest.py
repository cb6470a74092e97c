from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy import cli
from tests.support.proxy.command_bench import CommandBench, Tidegate, command_bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[CommandBench]:
    async with command_bench(tmp_path) as made:
        yield made


@pytest.fixture
def tidegate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tidegate:
    """The settings name a broker that does not answer."""
    config = tmp_path / "tidegate.toml"
    config.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run([*arguments, "--config", str(config)])
        return code, *capsys.readouterr()

    return run
