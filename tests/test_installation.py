"""The commands of README.md and docs/start.md that install Tidegate in a clone: the programs start, no file is missing.

The packages that Tidegate needs are those of this environment, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.documents import shell_commands
from tests.support.repository import ROOT, tracked

pytestmark = pytest.mark.full

OUR_PACKAGES = ("protocol", "tiers", "proxy", "pipeline", "tidegate")


def installing(page: str) -> list[str]:
    begin = ("python3 -m venv", ".venv/bin/pip install --no-deps")
    return [command for command in shell_commands(ROOT / page) if command.startswith(begin)]


def run(command: str, clone: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    words = [sys.executable if word == "python3" else word for word in shlex.split(command)]
    ended = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def clone_of_the_repository(folder: Path) -> Path:
    for path in tracked(*OUR_PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


def give_packages(clone: Path) -> Path:
    """Gives the environment of the clone all packages of this one but Tidegate. Returns its folder of packages."""
    (packages,) = (clone / ".venv/lib").glob("python*/site-packages")
    for outdated in packages.glob("setuptools*"):
        shutil.rmtree(outdated)
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        is_ours = "tidegate" in installed.name or installed.name in OUR_PACKAGES
        if not is_ours and not (packages / installed.name).exists():
            (packages / installed.name).symlink_to(installed)
    return packages


def test_a_clone_installs_the_programs_and_all_files(tmp_path: Path) -> None:
    clone = clone_of_the_repository(tmp_path / "tidegate")
    create, install = installing("README.md")
    assert installing("docs/start.md") == [create, install]
    run(create, clone)
    packages = give_packages(clone)
    run(install, clone)

    assert run(".venv/bin/tidegate --version", clone).strip() == version("tidegate")
    assert run(".venv/bin/tidegate-pipeline --help", clone).startswith("Usage: tidegate-pipeline")
    where = run(""".venv/bin/python -P -c "import tidegate; print(tidegate.__file__)" """, clone)
    assert Path(where.strip()) == packages / "tidegate/__init__.py"
    files = tracked(*OUR_PACKAGES)
    missing = [str(path) for each in files if not (path := packages / each.relative_to(ROOT)).is_file()]
    assert files
    assert missing == []
    listed = json.loads(run(".venv/bin/python -m pip list --format json", clone))
    assert {"name": "tidegate", "version": version("tidegate")} in [
        {"name": each["name"], "version": each["version"]} for each in listed
    ]

    other = packages / "proxy/__init__.py"
    other.write_text("# Another distribution with a package `proxy`, installed into the same environment.\n")
    with pytest.raises(AssertionError, match=f"tidegate: Python finds another package `proxy` at {other}"):
        run(".venv/bin/tidegate --version", clone)
