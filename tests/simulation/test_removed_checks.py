"""The list of safety checks names code that exists, and a check that is removed is missing."""

from __future__ import annotations

import importlib

import pytest

from tests.support.mutants.live_functions import applied
from tests.support.repository import ROOT
from tests.support.simulation.removed_checks import CHECKS
from tiers.model.log_source import EpochEndOffset
from tiers.tasks.history import lineage


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_of_the_list_can_be_removed(name: str) -> None:
    check = CHECKS[name]
    importlib.import_module(check.path.removesuffix(".py").replace("/", "."))
    with applied(ROOT, check):
        pass


def test_a_removed_check_is_back_afterwards() -> None:
    check = CHECKS["lineage:is_cut"]
    answer = EpochEndOffset(3, 10)
    assert not lineage.is_cut(answer, 2, 0)
    with applied(ROOT, check):
        assert lineage.is_cut(answer, 2, 0)
    assert not lineage.is_cut(answer, 2, 0)
