"""`Tenure`: a time in which no other owner can have written a metadata partition, over rebalances and takeovers.

A process may lose and regain the ownership within one tenure: in a rebalance that leaves the partition with it, or when
it recovers from an error. What it began within a tenure, it may finish within the same tenure. When another owner may
have written in between, the next tenure begins, and everything that was begun before must be dropped.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class Tenure(NamedTuple):
    metadata_partition: int
    number: int


_begun_in: ContextVar[Tenure | None] = ContextVar("begun_in", default=None)


def begin_in(tenure: Tenure | None) -> None:
    """Declares that this task, and those that it creates from now on, work within the tenure.

    Their writes as an owner wait for a short loss of the ownership, and fail when the tenure has ended."""
    _begun_in.set(tenure)


def begun_in(metadata_partition: int) -> Tenure | None:
    """Returns the tenure of the metadata partition in which this task works; None: it works in none."""
    tenure = _begun_in.get()
    return tenure if tenure is not None and tenure.metadata_partition == metadata_partition else None
