"""Chooses what the page says of an explanation: one answer per reason, about the oldest segment with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from proxy.admin.facts import WhyFacts
from tiers.explain.answers import PartitionAnswer, Question, Why

MAX_PER_QUESTION: Final = 3
_ORDER: Final = (Question.ON_BROKER, Question.NOT_REMOTE, Question.NOT_EXPIRED)


def whys_of(answer: PartitionAnswer) -> tuple[WhyFacts, ...]:
    """Returns at most `MAX_PER_QUESTION` answers to each question."""
    about: dict[Question, list[tuple[str, Why]]] = {question: [] for question in _ORDER}
    for segment in answer.segments:
        for why in segment.whys:
            about[why.question].append((f"offsets {segment.start_offset} to {segment.end_offset}", why))
    uncopied = answer.uncopied
    for why in uncopied.whys:
        about[why.question].append((f"offsets {uncopied.first_offset} to {uncopied.next_offset - 1}", why))
    return tuple(fact for question in _ORDER for fact in _of_question(about[question]))


def _of_question(found: Sequence[tuple[str, Why]]) -> list[WhyFacts]:
    by_reason: dict[str, list[tuple[str, Why]]] = {}
    for about, why in found:
        by_reason.setdefault(why.reason, []).append((about, why))
    return [WhyFacts(alike[0][0], len(alike) - 1, alike[0][1]) for alike in by_reason.values()][:MAX_PER_QUESTION]
