"""Where another package has the name of one of Tidegate's, the programs and `tidegate.read` say so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tidegate.own_packages import check_packages

PACKAGES = ("protocol", "tiers", "proxy", "pipeline")
WHAT_TO_DO = (
    "take that folder out of PYTHONPATH, start in another folder, or install Tidegate into a virtual environment of"
    " its own"
)
PROXY = "from tidegate.__main__ import tidegate; tidegate()"
PIPELINE = "from tidegate.__main__ import tidegate_pipeline; tidegate_pipeline()"
READ = "import tidegate; tidegate.read(None, 'orders')"


def a_package(folder: Path, name: str) -> Path:
    path = folder / name / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text("raise SystemExit('another package was imported')\n")
    return path


def a_module(folder: Path, name: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text("raise SystemExit('another module was imported')\n")
    return path


def a_package_in_latin_1(folder: Path, name: str) -> Path:
    path = a_package(folder, name)
    path.write_bytes("# a caf\u00e9\n".encode("latin-1"))
    return path


def an_archive(folder: Path, name: str) -> Path:
    path = folder / "others.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
    return path / name / "__init__.py"


def run(*arguments: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("program", "name", "before"),
    [
        (PROXY, "protocol", "tidegate: "),
        (PROXY, "proxy", "tidegate: "),
        (PIPELINE, "pipeline", "tidegate-pipeline: "),
        (READ, "tiers", "ImportError: "),
    ],
)
def test_another_package_on_the_path_is_named(program: str, name: str, before: str, tmp_path: Path) -> None:
    other = a_package(tmp_path / "others", name)
    ended = run("-P", "-c", program, path=[tmp_path / "others", ROOT], cwd=tmp_path)
    *more, line = ended.stderr.splitlines()
    assert line == f"{before}Python finds another package `{name}` at {other} in place of Tidegate's: {WHAT_TO_DO}"
    if program != READ:
        assert (more, ended.stdout, ended.returncode) == ([], "", 2)


@pytest.mark.parametrize("other", [a_package, a_package_in_latin_1, a_module, an_archive])
def test_packages_modules_and_archives_are_found(
    other: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = other(tmp_path, "proxy")
    monkeypatch.delitem(sys.modules, "proxy", raising=False)
    monkeypatch.syspath_prepend(str(path.parents[1] if path.name == "__init__.py" else path.parent))
    with pytest.raises(ImportError, match=f"`proxy` at {path} in place of"):
        check_packages("tiers", "proxy")


def test_a_distribution_that_overwrote_a_package_is_found(tmp_path: Path) -> None:
    """pip lets it: the folder is Tidegate's, and what is in it is not."""
    for name in ("tidegate", *PACKAGES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text((ROOT / name / "__init__.py").read_text())
    for name in ("own_packages", "__main__"):
        (tmp_path / "tidegate" / f"{name}.py").write_text((ROOT / "tidegate" / f"{name}.py").read_text())
    overwritten = tmp_path / "proxy/__init__.py"
    overwritten.write_text("raise SystemExit('another package was imported')\n")
    ended = run("-P", "-c", PROXY, path=[tmp_path], cwd=tmp_path)
    assert f"another package `proxy` at {overwritten} in place" in ended.stderr
    assert (len(ended.stderr.splitlines()), ended.returncode) == (1, 2)


def test_python_m_tidegate_is_the_command(tmp_path: Path) -> None:
    """A package that the command does not need may be another one."""
    a_package(tmp_path, "pipeline")
    ended = run("-m", "tidegate", path=[ROOT], cwd=tmp_path)
    assert ended.stdout.startswith("Usage: tidegate [OPTIONS] COMMAND")
    assert (ended.stderr, ended.returncode) == ("", 0)
