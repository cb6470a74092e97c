"""docs/alarms.md has every log line of the level ERROR and every reason of the alarm counter, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from proxy.commands.metrics_reference import all_metrics
from proxy.log_events import ALARMS, page_of
from tests.support.log_lines import error_phrases, sources
from tests.support.repository import ROOT
from tiers.tasks.alarms import AlarmReason

PAGE = (ROOT / "docs" / "alarms.md").read_text()


def reasons_of_the_code() -> set[str]:
    """Returns the reasons that code outside of their module names."""
    return {
        AlarmReason[node.attr]
        for path, module in sources()
        if path.name != "alarms.py"
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "AlarmReason"
    }


def rows() -> Iterator[dict[str, str]]:
    headings: list[str] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        elif set(line) - set("|-"):
            assert len(cells) == len(headings), line
            assert all(cells), line
            yield dict(zip(headings, cells, strict=True))


def test_the_page_has_every_error_line() -> None:
    said = [phrase for row in rows() for phrase in row["Log line"].split("<br>")]
    assert len(said) == len(set(said))
    assert set(said) == error_phrases() == set(ALARMS)


def test_the_page_has_every_reason() -> None:
    said = [row["Reason"].strip("`") for row in rows() if "Reason" in row]
    assert len(said) == len(set(said))
    assert set(said) == reasons_of_the_code() == set(AlarmReason)


def test_the_metrics_of_the_page_exist() -> None:
    exposed = {spec.exposed_name for spec in all_metrics()}
    assert set(re.findall(r"`(tidegate_\w+)`", PAGE)) <= exposed


def test_every_line_links_its_runbook_page() -> None:
    for row in rows():
        pages = {page_of(ALARMS[said]) for said in row["Log line"].split("<br>")}
        assert pages == {re.fullmatch(r"\[([\w-]+)\]\(runbook/\1\.md\)", row["Runbook"])[1]}  # type: ignore[index]
