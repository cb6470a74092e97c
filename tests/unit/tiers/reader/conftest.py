from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is left alone after a second without an answer, which a thread of a busy machine may need to begin."""
    monkeypatch.setattr("tiers.reader.chunk_cache._READ_DEADLINE_S", 60.0)
