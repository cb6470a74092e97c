"""What an operator is shown is whole, however narrow the terminal is."""

from __future__ import annotations

import pytest

from tiers.console import show_table


def test_numbers_are_folded_and_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    names = ("partition", "from", "bytes")
    show_table(names, [("orders-0", 123_456_789_012, 1_073_741_824)], names[1:])
    shown = capsys.readouterr().out
    first, second = shown.splitlines()[-3:-1]
    assert len(first) == 30
    assert first.split() == ["orders-", "1234567", "107374"]
    assert second.split() == ["0", "89012", "1824"]
