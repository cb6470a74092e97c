"""Takes the code blocks out of a Markdown page, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    language: str
    text: str

    def commands(self) -> list[str]:
        """Returns the commands of a shell block, without comments. A line that ends with a backslash goes on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := line.partition(" #")[0].strip())]


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]
