"""`make release`: it refuses what no tag describes, and builds what the tag has."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.release import RefusedError, build, locked, sbom, version_at_head
from tests.support.repository import ROOT, tracked
from tests.support.tools import programs

LOCK = """aiohttp==3.14.5 \\
    --hash=sha256:0133 \\
    --hash=sha256:038c
    # via tidegate (pyproject.toml)
idna==3.20 ; python_version >= "3" \\
    --hash=sha256:aaaa
    # via
    #   aiohttp
    #   yarl
setuptools==84.2.1 \\
    --hash=sha256:3ff8
    # via tidegate (pyproject.toml::build-system.requires)
"""
AT = datetime(2026, 11, 30, tzinfo=UTC)

Git = Callable[..., str]


def git_in(folder: Path) -> Git:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

    return git


def repository(folder: Path) -> Git:
    (folder / "pyproject.toml").write_text('[project]\nname = "tidegate"\nversion = "1.2.0"\n')
    chart = folder / "deploy/helm/tidegate/Chart.yaml"
    chart.parent.mkdir(parents=True)
    chart.write_text('version: 1.2.0\nappVersion: "1.2.0"\n')
    git = git_in(folder)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "begin")
    return git


def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    git = repository(tmp_path)
    with pytest.raises(RefusedError, match=r"HEAD has no tag: git tag v1\.2\.0"):
        version_at_head(tmp_path)
    git("tag", "v1.3.0")
    with pytest.raises(RefusedError, match=r"the tag of HEAD is v1\.3\.0, but pyproject\.toml has the version 1\.2\.0"):
        version_at_head(tmp_path)
    git("tag", "v1.2.0")
    assert version_at_head(tmp_path) == "1.2.0"
    (tmp_path / "forgotten.py").touch()
    with pytest.raises(RefusedError, match=r"changes that are in no commit.*\n\?\? forgotten\.py"):
        version_at_head(tmp_path)


def test_the_chart_has_the_version_of_the_tag(tmp_path: Path) -> None:
    git = repository(tmp_path)
    (tmp_path / "deploy/helm/tidegate/Chart.yaml").write_text('version: 1.2.0\nappVersion: "1.1.0"\n')
    git("commit", "-qam", "change")
    git("tag", "v1.2.0")
    with pytest.raises(RefusedError, match=r"Chart\.yaml has the appVersion 1\.1\.0"):
        version_at_head(tmp_path)


def test_an_sbom_has_the_packages_and_what_needs_them() -> None:
    found = sbom("1.2.0", locked(LOCK), AT)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["timestamp"] == "2026-11-30T00:00:00+00:00"
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/tidegate@1.2.0"
    aiohttp, idna, setuptools = found["components"]
    assert (aiohttp["name"], aiohttp["version"], aiohttp["purl"]) == ("aiohttp", "3.14.5", "pkg:pypi/aiohttp@3.14.5")
    assert aiohttp["hashes"] == [{"alg": "SHA-256", "content": each} for each in ("0133", "038c")]
    assert {each["ref"]: each["dependsOn"] for each in found["dependencies"]} == {
        "pkg:pypi/tidegate@1.2.0": [aiohttp["purl"], setuptools["purl"]],
        aiohttp["purl"]: [idna["purl"]],
        idna["purl"]: [],
        setuptools["purl"]: [],
    }


def test_an_sbom_of_the_lock_has_each_package_once() -> None:
    lock = (ROOT / "requirements.txt").read_text()
    found = sbom("1.2.0", locked(lock), AT)
    assert len(found["components"]) == len(re.findall(r"^\S+==", lock, re.MULTILINE))
    assert sum(len(each["hashes"]) for each in found["components"]) == lock.count("--hash=sha256:")
    needed = {ref for each in found["dependencies"] for ref in each["dependsOn"]}
    assert needed == {each["bom-ref"] for each in found["components"]}
    assert "://" not in json.dumps(found)


@pytest.mark.full
def test_a_release_has_all_files_and_their_sums(tmp_path: Path) -> None:
    for path in (*tracked(), ROOT / "proxy/admin/runbook"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy, follow_symlinks=False)
    git = git_in(tmp_path)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "begin")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    git("tag", f"v{version}")
    release = build(tmp_path, programs.program("helm"))
    sums = dict(line.split("  ")[::-1] for line in (release / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {
        f"tidegate-{version}-py3-none-any.whl",
        f"tidegate-{version}.cdx.json",
        f"tidegate-{version}.tar.gz",
        f"tidegate-{version}.tgz",
    }
    assert all(hashlib.sha256((release / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())
    with zipfile.ZipFile(release / f"tidegate-{version}-py3-none-any.whl") as wheel:
        packaged = {str(path.relative_to(ROOT)) for path in tracked("proxy/*", "protocol/*", "tidegate/*")}
        pages = {f"proxy/admin/runbook/{path.name}" for path in tracked("docs/runbook/*")}
        assert packaged | pages <= set(wheel.namelist())
    assert git("status", "--porcelain") == ""
