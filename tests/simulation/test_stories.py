"""Tells the stories of losses that were once proved: none of them happens again."""

from __future__ import annotations

import pytest

from tests.support.simulation.planted import planted
from tests.support.simulation.stories import Script, tell
from tests.support.simulation.stories_list import STORIES


@pytest.mark.parametrize("script", [pytest.param(one, id=one.name) for one in STORIES.values()])
def test_a_story_goes_as_it_must(script: Script) -> None:
    told = tell(script)
    assert told.failure is None, f"{script.says} {told.failure}"


def test_a_story_finds_an_owner_that_counts_local_bytes_twice() -> None:
    with planted("counts-local-twice"):
        told = tell(STORIES["size-retention-right-after-a-takeover"])
    assert told.failure is not None
    assert "beyond offset 0, whose records must be kept" in told.failure
