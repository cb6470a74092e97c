"""Every whole settings file in a document is valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config import load_config
from tests.support.documents import blocks
from tests.support.repository import ROOT, tracked

FILES = [
    (f"{path.relative_to(ROOT)}-{number}", block.text)
    for path in tracked("*.md")
    for number, block in enumerate(block for block in blocks(path) if block.language == "toml")
    if "[upstream]" in block.text
]
SECRET = re.compile(r'\.file = "(/[^"]+)"')


@pytest.mark.parametrize(("name", "text"), FILES, ids=[name for name, _ in FILES])
def test_a_settings_file_of_a_document_is_valid(name: str, text: str, tmp_path: Path) -> None:
    for number, file in enumerate(SECRET.findall(text)):
        (tmp_path / str(number)).write_text("a-secret-of-the-test")
        text = text.replace(file, str(tmp_path / str(number)))
    path = tmp_path / "tidegate.toml"
    path.write_text(text)
    config = load_config(path)
    if name.startswith("docs/connections.md"):
        tables = re.findall(r"^\[(\w+)\.(\w+)\]", text, re.MULTILINE)
        (listener,) = config.listener
        found = {"upstream": config.upstream, "listener": listener}
        assert all(getattr(found[section], key) is not None for section, key in tables)


def test_the_page_of_the_connections_has_a_file_for_each_case() -> None:
    assert sum(name.startswith("docs/connections.md") for name, _ in FILES) == 7
