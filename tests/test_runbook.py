"""The runbook has a page for every alarm and every alert rule, and each page has all parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.commands.metrics_reference import all_metrics
from proxy.config import TidegateConfig
from proxy.log_events import ALARMS, EVENTS, page_of
from tests.support.repository import ROOT
from tiers.config.setting_keys import key_of, own_fields

FOLDER = ROOT / "docs" / "runbook"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.stem != "index"}
GROUPS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/tidegate-alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PARTS = ["What happens", "What is at risk", "How to look", "What to do", "When it ends"]


def page_of_rule(rule: dict[str, Any]) -> str:
    found = re.fullmatch(r"docs/runbook/([\w-]+)\.md", rule["annotations"]["runbook_url"])
    assert found is not None, rule
    return found[1]


def test_the_pages_are_those_of_the_alarms_and_alerts() -> None:
    assert set(PAGES) == {page_of(alarm) for alarm in ALARMS.values()} | {page_of_rule(rule) for rule in RULES}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_all_parts(page: str) -> None:
    text = PAGES[page]
    assert text.startswith(f"# {page}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS
    assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_its_alerts_and_its_log_lines(page: str) -> None:
    text = PAGES[page]
    alerts = [rule["alert"] for rule in RULES if page_of_rule(rule) == page]
    assert re.findall(r"`(Tidegate\w+)`", text) == alerts
    events = sorted((event, said) for said, event in ALARMS.items() if page_of(event) == page)
    assert re.findall(r"^\| `([^|]+)` \| ([^|]+) \|", text, re.MULTILINE) == events


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    text = PAGES[page]
    exposed = {spec.exposed_name for spec in all_metrics()}
    assert set(re.findall(r"`(tidegate_\w+)[`{]", text)) <= exposed
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (FOLDER / link).is_file(), link
    for page_name, heading in re.findall(r"\"([^\"]+)\" in \[([\w.]+)\]", text.replace("\n", " ")):
        assert f"## {page_name}\n" in (ROOT / "docs" / heading).read_text()
    known = {key for model in TidegateConfig.section_models().values() for key in _keys(model)}
    known |= set(TidegateConfig.keys_at_top())
    named = set(re.findall(r"`((?:remote\.log|held|drain|max)\.[\w.]+)`", text))
    assert named - known == set()
    assert set(re.findall(r"The log says `([^`]+)`", text)) <= EVENTS.keys()


def _keys(model: Any) -> set[str]:
    return {key_of(name, field) for name, field in own_fields(model).items()}


def test_the_folder_has_pages_alone() -> None:
    assert [path for path in Path(FOLDER).iterdir() if path.suffix != ".md"] == []
