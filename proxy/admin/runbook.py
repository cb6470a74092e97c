"""The pages of the runbook as HTML. The folder `runbook` beside this file is docs/runbook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from urllib.parse import quote

from markdown_it import MarkdownIt
from markupsafe import Markup

_NAME = re.compile(r"[a-z0-9-]+")
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


@dataclass(frozen=True, slots=True)
class RunbookPage:
    """A page of the runbook. `title` is its first sentence, `text` is the rest, `what_to_do` is a section of `text`."""

    name: str
    title: Markup
    text: Markup
    what_to_do: Markup


def runbook_link(alarm: str) -> str:
    return f"/runbook/{quote(_page_of(alarm), safe='')}"


@lru_cache(maxsize=64)
def runbook_page(alarm: str) -> RunbookPage | None:
    """Returns the page about an alarm or an alert; None: there is no such page."""
    name = _page_of(alarm)
    if not _NAME.fullmatch(name) or name == "index":
        return None
    path = files("proxy.admin") / "runbook" / f"{name}.md"
    if not path.is_file():
        return None
    _, title, text = path.read_text(encoding="utf-8").split("\n\n", 2)
    title = _MARKDOWN.renderInline(title.removesuffix("."))
    what_to_do = text.partition("## What to do\n")[2].partition("\n## ")[0]
    return RunbookPage(name, Markup(title), _html(text), _html(what_to_do))


def _page_of(alarm: str) -> str:
    """The alarms about the broker's retention share a page. Every other one has the page of its name."""
    return "broker-retention" if alarm.startswith("broker-retention-") else alarm


def _html(text: str) -> Markup:
    """The proxy serves the runbook alone: a link to another document becomes its path."""
    text = re.sub(r"\[[^\]]+\]\(\.\./([^)]+)\)", r"docs/\1", text)
    return Markup(_MARKDOWN.render(re.sub(r"\]\(([\w-]+)\.md\)", r"](/runbook/\1)", text)))
