"""The documentation builds without a warning, and its generated pages are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT, tracked
from tests.support.servers.jars import pom_property
from tests.support.servers.kafka import POM


def test_the_page_of_the_commands_is_up_to_date() -> None:
    """The command writes the page, with `--output docs/commands.md`."""
    arguments = ["proxy.cli", "utils", "docs", "--name", "tidegate", "--title", "Commands"]
    command = [sys.executable, "-m", "typer", *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/commands.md").read_text() == printed


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs/index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    listed = {(ROOT / "docs" / f"{line}.md").resolve() for tree in trees for line in tree.split() if line[0] != ":"}
    pages = {path for path in tracked("docs/*.md") if path.parent == ROOT / "docs" and path.name != "index.md"}
    assert pages
    assert pages <= listed


def test_the_policy_names_the_versions_of_kafka_that_are_tested() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("## Versions of Kafka")[2]
    named = [re.findall(r"\d\.\d\.\d", row) for row in re.findall(r"^\| (\d[^|]+) \|", table, re.MULTILINE)]
    of_matrix = re.search(r"^KAFKA_VERSIONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert of_matrix
    assert named == [[pom_property(POM, "kafka.version")], of_matrix[1].split()]


@pytest.mark.full
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        "docs",
        "-b",
        "html",
        ".",
        str(tmp_path),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert "Start in five minutes" in (tmp_path / "docs/index.html").read_text()
