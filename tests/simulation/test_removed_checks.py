"""The list of safety checks names code that exists, and a check that is removed is missing."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.mutants.live_functions import applied
from tests.support.repository import ROOT
from tests.support.simulation.removed_checks import CHECKS
from tiers.errors import LogDivergedError
from tiers.tasks.history import align


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_of_the_list_can_be_removed(name: str) -> None:
    check = CHECKS[name]
    importlib.import_module(check.path.removesuffix(".py").replace("/", "."))
    with applied(ROOT, check):
        pass


async def test_a_removed_check_is_back_afterwards() -> None:
    log, check = InMemoryLog(batch_of(0, 10)), CHECKS["align:check_lineage"]
    ask = partial(align.check_lineage, log, PARTITION, 0, 11, 1_000)
    with pytest.raises(LogDivergedError):
        await ask()
    with applied(ROOT, check):
        await ask()
    with pytest.raises(LogDivergedError):
        await ask()
