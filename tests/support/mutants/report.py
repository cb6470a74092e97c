"""The report of a run: the table of all folders, the survivors, and the comparison with an earlier report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.mutants.gate import Outcome, Tested
from tests.support.mutants.mutations import Mutant

_KILLED = (Outcome.KILLED.value, Outcome.TIMED_OUT.value)
_COLUMNS = (Outcome.KILLED, Outcome.TIMED_OUT, Outcome.SURVIVED, Outcome.NOT_EXECUTED)


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of the mutants of each folder, by their names."""

    folders: Mapping[str, Mapping[str, str]]
    about: Mapping[str, Mapping[str, Any]]
    """The seed, the commit and the machine of each folder."""

    @classmethod
    def of(cls, results: Mapping[str, Sequence[Tested]], about: Mapping[str, Any]) -> Report:
        outcomes = {
            folder: {one.mutant.name: one.outcome.value for one in tested if one.outcome is not Outcome.NOT_RUN}
            for folder, tested in results.items()
        }
        return cls(outcomes, dict.fromkeys(results, about))

    @classmethod
    def load(cls, path: Path) -> Report:
        saved = json.loads(path.read_text())
        return cls(
            {folder: one["outcomes"] for folder, one in saved.items()},
            {folder: one["about"] for folder, one in saved.items()},
        )

    def save(self, path: Path) -> None:
        """Adds the folders to those that the file has."""
        saved = json.loads(path.read_text()) if path.exists() else {}
        for folder, outcomes in self.folders.items():
            sorted_outcomes = dict(sorted(outcomes.items()))
            saved[folder] = {"about": self.about[folder], **self.counts(folder), "outcomes": sorted_outcomes}
        path.write_text(json.dumps(dict(sorted(saved.items())), indent=1) + "\n")

    def counts(self, folder: str) -> dict[str, float]:
        counts = Counter(self.folders[folder].values())
        return {
            "mutants": counts.total(),
            **{outcome.value: counts[outcome.value] for outcome in _COLUMNS},
            "kill rate": round(self.kill_rate(folder), 3),
        }

    def kill_rate(self, folder: str) -> float:
        """Returns the share of the mutants that were killed or timed out."""
        counts = Counter(self.folders[folder].values())
        return sum(counts[killed] for killed in _KILLED) / max(1, counts.total())

    def table(self) -> Iterator[str]:
        width = max(len("folder"), *map(len, self.folders))
        heads = ["mutants", *(outcome.value for outcome in _COLUMNS), "kill rate"]
        yield " | ".join([f"{'folder':{width}}", *heads])
        for folder in self.folders:
            counts = self.counts(folder)
            cells = [
                f"{counts[head]:>{len(head)}.1%}" if head == "kill rate" else f"{counts[head]:>{len(head)}}"
                for head in heads
            ]
            yield " | ".join([f"{folder:{width}}", *cells])

    def fallen(self, earlier: Report) -> Iterator[str]:
        """Yields a line for each folder whose kill rate is lower than in an earlier report."""
        for folder in self.folders.keys() & earlier.folders.keys():
            now, before = self.kill_rate(folder), earlier.kill_rate(folder)
            if now < before:
                yield f"{folder}: the kill rate fell from {before:.1%} to {now:.1%}"

    def new_survivors(self, earlier: Report) -> Iterator[str]:
        """Yields a line for each mutant that a test killed in an earlier report, and none kills now."""
        for folder in self.folders.keys() & earlier.folders.keys():
            for name, outcome in self.folders[folder].items():
                before = earlier.folders[folder].get(name)
                if before in _KILLED and outcome not in _KILLED:
                    yield f"{name} was {before}, and is {outcome}"


def survivors(results: Mapping[str, Sequence[Tested]], mutants: Mapping[str, Mutant]) -> Iterator[str]:
    """Yields the name and the changed line of each mutant that no test killed. `mutants` has all of them by name."""
    for tested in results.values():
        for outcome in (Outcome.SURVIVED, Outcome.NOT_EXECUTED):
            for one in tested:
                if one.outcome is outcome:
                    mutant = mutants[one.mutant.name]
                    yield f"{outcome.value}: {mutant.name} (line {mutant.line})"
                    yield f"    {mutant.change}"
