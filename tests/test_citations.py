"""Every citation of our own documents has one form, and names a section that exists.

docs/design.md, safety rule 2       docs/design.md, safety rules 1, 2 and 4
docs/semantics.md 9.3               docs/semantics.md 3.5, 6.3
docs/founding.md, "Flat file"       any page: a heading in quotes; founding.md: a name of its table
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.repository import ROOT, tracked

OWN_PATH = Path(__file__).resolve()
NUMBERS = r"\d+(?:\.\d+)?(?:, \d+(?:\.\d+)?)*"
RULES = r"\d+(?:, \d+)*(?: and \d+)?"
CITATION = re.compile(
    rf"docs/(?P<page>[\w/-]+)\.md"
    rf"(?:, safety rules? (?P<rules>{RULES})|, (?P<quote>[\"'])(?P<heading>.+?)(?P=quote)| (?P<numbers>{NUMBERS}))?"
)
OTHER_FORMS = [
    re.compile(form)
    for form in (
        r"\bDESIGN\b",
        r"\b[Ss]emantics,? \(?(?:section )?\d",
        r"(?<!docs/design\.md, )\b[Ss]afety rules? \d",
        r"\b[Ff]ounding documents?\b",
        r"\bAppendix [A-Z]\b",
        r"\bspec/\w",
        r"(?<=[\w.`] )\(\d{1,2}\.\d\)",
        r"\b[Ii]ssues? (?:#?\d|\")",
        r"docs/[\w/-]+\.md,? (?:section|rule|§)",
        r"docs/semantics\.md, \d",
        r"docs/[\w/-]+\.md`,? (?:safety rule|\d+\.\d|[\"'])",
    )
]


def flat(text: str) -> str:
    """The text on one line, without the marks of comments: a citation may go on in the next line."""
    return re.sub(r"\s*\n\s*(?:#+ +)?", " ", text)


@cache
def headings(page: str) -> frozenset[str]:
    """Returns the headings that a citation of a page may have in quotes. Empty: there is no such page."""
    path = ROOT / "docs" / f"{page}.md"
    if not path.is_file():
        return frozenset()
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    if page == "founding":
        found += [name.strip() for name in re.findall(r"^\|([^|]+)\|", path.read_text(), re.MULTILINE)]
    return frozenset(found)


@cache
def numbers(page: str) -> frozenset[str]:
    """The numbers of a page's headings: sections of the semantics, safety rules of the design."""
    found = (re.match(r"(\d+(?:\.\d+)?)\.? ", heading) for heading in headings(page))
    return frozenset(one[1] for one in found if one)


def wrong_citations(text: str) -> list[str]:
    text = flat(text)
    wrong = [found[0] for form in OTHER_FORMS for found in form.finditer(text)]
    for cited in CITATION.finditer(text):
        page = cited["page"]
        known = bool(headings(page))
        if cited["rules"] is not None:
            known = page == "design" and numbers(page).issuperset(re.findall(r"\d+", cited["rules"]))
        elif cited["heading"] is not None:
            known = cited["heading"] in headings(page)
        elif cited["numbers"] is not None:
            known = page == "semantics" and numbers(page).issuperset(cited["numbers"].split(", "))
        if not known:
            wrong.append(cited[0])
    return wrong


def test_every_citation_is_right() -> None:
    paths = [path for path in tracked("*.py", "*.md", "*.toml", "*.yml", "Makefile") if path != OWN_PATH]
    assert {str(path.relative_to(ROOT)): wrong for path in paths if (wrong := wrong_citations(path.read_text()))} == {}


def test_the_safety_rules_are_eight() -> None:
    assert numbers("design") == {str(number) for number in range(1, 9)}


def test_the_semantics_name_only_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "docs" / "semantics.md").read_text()))
    assert named
    assert named - {path.name for path in tracked("tests/*.py")} == set()


@pytest.mark.parametrize(
    "text",
    [
        "see docs/design.md",
        "(docs/design.md, safety rules 1, 2 and 4)",
        "    # (docs/semantics.md 9.3,\n    # 9.4; docs/design.md, safety\n    # rule 8).",
        'docs/founding.md, "Flat file"; docs/design.md, "Words"',
        "docs/recovery.md, 'A partition stops'",
        "founding names, and an appendix; designed by issue; time.sleep(0.5)",
    ],
)
def test_right_citations_pass(text: str) -> None:
    assert wrong_citations(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "(DESIGN, RLMM)",
        "(safety rule 2)",
        "docs/design.md, safety rule 9",
        "docs/design.md, safety rules 1, 2 and 9",
        'docs/design.md, "Flow 1"',
        "docs/design.md 2",
        "(semantics 9.3)",
        "(semantics\n9.3)",
        "docs/semantics.md 99.1",
        "docs/semantics.md 9.3, 99.1",
        "docs/semantics.md, 9.3",
        "another topic (9.3).",
        "(founding documents, RLM tasks)",
        'docs/founding.md, "Nothing"',
        "Appendix A",
        "spec/perf.md 3",
        "`docs/semantics.md` 9.3",
        "docs/nowhere.md",
        "issue 12",
    ],
)
def test_wrong_citations_are_found(text: str) -> None:
    assert wrong_citations(text)
