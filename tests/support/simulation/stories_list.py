"""All stories, in the order of their modules."""

from __future__ import annotations

from tests.support.simulation import stories_of_copies, stories_of_history
from tests.support.simulation.stories import Script, tell

STORIES = {
    one.name: one
    for module in (stories_of_copies, stories_of_history)
    for one in vars(module).values()
    if isinstance(one, Script)
}


def failure(name: str) -> str | None:
    """Tells a story. Returns how it goes another way; None: it goes as it must."""
    return tell(STORIES[name]).failure
