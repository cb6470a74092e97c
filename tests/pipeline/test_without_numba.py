"""Without numba, the Python decoder reads everything."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tiers.commands.console import FINDINGS

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
DECODE = """if True:
    import sys
    from pipeline.decode.arrow_records import decode_batches
    assert "numba" not in sys.modules
    (batch,) = decode_batches(
        bytes.fromhex(sys.argv[1]), topic="t", partition=0, first_offset=0, end_offset=99, is_committed_only=True
    )
    print(batch.select(["offset", "value"]).to_pylist())
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """All that is installed here but numba and what it alone needs."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if not installed.name.startswith(("numba", "llvmlite")):
            (folder / installed.name).symlink_to(installed)
    return folder


def python(libraries: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{ROOT}:{libraries}", "HOME": str(libraries), "PATH": os.environ["PATH"]}
    command: list[str | Path] = [PYTHON, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_without_numba_records_are_decoded_and_commands_run(libraries: Path) -> None:
    missing = python(libraries, "-c", "import numba")
    assert "ModuleNotFoundError: No module named 'numba'" in missing.stderr
    decoded = python(libraries, "-c", DECODE, batch_of(10, 1, value_bytes=4).hex())
    assert decoded.stdout == "[{'offset': 10, 'value': b'10-x'}]\n"
    assert decoded.stderr == "records are decoded without numba, which is slow\n"
    warmed = python(libraries, "-m", "pipeline", "warm")
    assert warmed.returncode == FINDINGS
    assert warmed.stderr.endswith(
        "numba cannot be loaded: a slower decoder with the same results decodes the records\n"
    )
