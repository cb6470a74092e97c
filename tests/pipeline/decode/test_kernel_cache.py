"""The places of the compiled kernels: the package, a folder that outlives a zip file, or none without numba."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from pipeline.decode.arrow_records import warm
from pipeline.decode.kernel_cache import cache_folder, import_from_stable_path, load_kernels
from tests.support.fakes.record_batches import batch_of
from tiers.commands.console import FINDINGS

ROOT = Path(__file__).parents[3]
WHERE = "from pipeline.decode.kernel_cache import load_kernels; print(load_kernels().__file__)"


def python(code: str, folder: Path, path: Path = ROOT, **environment: str) -> str:
    """Returns the output of another process, which has only the installed libraries."""
    done = subprocess.run(
        [sys.executable, "-c", code, batch_of(10, 1, value_bytes=4).hex()],
        cwd=folder,
        env={"PYTHONPATH": str(path), "HOME": str(folder), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_of_the_package_it_is_the_packages_own() -> None:
    kernels = load_kernels()
    assert kernels is not None
    assert kernels.__name__ == "pipeline.decode.kernels"
    assert warm()


def test_of_a_zip_it_is_a_copy_under_a_name_that_lasts(tmp_path: Path) -> None:
    found = set()
    for application in ("first", "second"):
        archive = tmp_path / f"{application}.zip"
        with zipfile.ZipFile(archive, "w") as packed:
            for source in (ROOT / "pipeline").glob("__init__.py"), (ROOT / "pipeline" / "decode").glob("*.py"):
                for path in source:
                    packed.write(path, path.relative_to(ROOT))
        found.add(python(WHERE, tmp_path, archive, XDG_CACHE_HOME=str(tmp_path / "cache")))
    (copy,) = map(Path, map(str.strip, found))
    assert copy.is_relative_to(tmp_path / "cache" / "tidegate")
    assert copy.read_bytes() == (ROOT / "pipeline" / "decode" / "kernels.py").read_bytes()


def test_other_source_is_another_copy(tmp_path: Path) -> None:
    one = import_from_stable_path("number = 1", tmp_path)
    assert import_from_stable_path("number = 1", tmp_path) is one
    assert import_from_stable_path("number = 2", tmp_path).number == 2
    assert one.number == 1
    assert len(list(tmp_path.rglob("*.py"))) == 2


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tidegate"
    cache_folder().chmod(0o777)
    with pytest.raises(OSError, match="other users may write"):
        cache_folder()


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


def without_numba(libraries: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{ROOT}:{libraries}", "HOME": str(libraries), "PATH": os.environ["PATH"]}
    command: list[str | Path] = [PYTHON, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_without_numba_records_are_decoded_and_commands_run(libraries: Path) -> None:
    missing = without_numba(libraries, "-c", "import numba")
    assert "ModuleNotFoundError: No module named 'numba'" in missing.stderr
    decoded = without_numba(libraries, "-c", DECODE, batch_of(10, 1, value_bytes=4).hex())
    assert decoded.stdout == "[{'offset': 10, 'value': b'10-x'}]\n"
    assert decoded.stderr == "records are decoded without numba, which is slow\n"
    warmed = without_numba(libraries, "-m", "pipeline", "warm")
    assert warmed.returncode == FINDINGS
    assert warmed.stderr.endswith(
        "numba cannot be loaded: a slower decoder with the same results decodes the records\n"
    )
