"""Takes the code blocks out of a Markdown page, in their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    language: str
    text: str

    def commands(self) -> list[str]:
        """Returns the commands of a shell block, without comments. A line that ends with a backslash goes on."""
        lines = re.sub(r" *\\\n *", " ", self.text).splitlines()
        each = [command for line in lines for command in line.partition(" #")[0].split(" && ")]
        return [command.strip() for command in each if command.strip()]


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^ *```(\S*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found]


def shell_commands(page: Path) -> list[str]:
    """Returns the commands of the page, in their order."""
    return [command for block in blocks(page) if block.language == "sh" for command in block.commands()]


def inline_commands(page: Path, programs: Sequence[str]) -> list[str]:
    """Returns what stands in backticks in the text and begins with one of the programs. Alternatives stay."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    begins = "|".join(map(re.escape, programs))
    found = re.findall(rf"(?<!`)`((?:\.venv/bin/)?(?:{begins})(?: [^`]*)?)`(?!`)", text)
    return [" ".join(each.replace("\\|", "|").split()) for each in found]
