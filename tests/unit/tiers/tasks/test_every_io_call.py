"""A copy, a trim and an expiry, ended at each of their calls to broker, store, metadata and disk, one after the other.

Whatever the call and whatever happens there, before it or after it: every offset is in one of the tiers while it lasts,
and in the end all is as if nothing had happened, with nothing left over in the store or the spool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fakes.io_calls import Event, ProcessEnded
from tests.support.tiers.partition_life import RETRIED_AFTER_MS, Life
from tests.support.tiers.workbench import PARTITION
from tiers.errors import RemoteLogError
from tiers.model.log_start import LogStart, LogStartReason

CALLS = {
    "broker.bounds",
    "broker.delete_records",
    "broker.end_offset_for_epoch",
    "broker.read",
    "broker.size_bytes",
    "fsync",
    "metadata.append",
    "metadata.ensure_fresh",
    "open",
    "replace",
    "store.copy_log_segment_data",
    "store.delete_log_segment_data",
    "store.fetch_indexes",
    "store.fetch_log_segment",
    "store.get_object",
    "store.put_object",
    "unlink",
}
"""At which something happened, at the least."""
PARTS = 4
"""The calls are tried in so many tests: on a busy machine, one test for all of them takes a minute."""


@contextmanager
def happening(life: Life, at: int, event: Event) -> Iterator[None]:
    life.process.calls.arm(at, event)
    try:
        with life.process.calls.with_files_below(life.folder):
            yield
    finally:
        life.process.calls.disarm()


EVENTS = [Event.KILLED_BEFORE, Event.KILLED_AFTER, Event.FAILED_BEFORE, Event.FAILED_AFTER, Event.CANCELLED_AFTER]


@pytest.mark.parametrize("first", range(PARTS))
@pytest.mark.parametrize("event", EVENTS, ids=lambda each: each.value)
async def test_it_ends_as_if_nothing_had_happened(event: Event, first: int, tmp_path: Path) -> None:
    """A failed call's process goes on; a cancelled one's lost the partition, and gets it again.

    It keeps what it has built, and what it was building goes."""
    at, has_happened = first, True
    while has_happened:
        life = Life(tmp_path / str(at))
        await life.process.open()
        with contextlib.suppress(ProcessEnded, RemoteLogError, OSError), happening(life, at, event):
            try:
                await life.live()
            except asyncio.CancelledError:
                life.process.manager.give_up()
                assert not [path for path in life.process.spooled() if path.suffix == ".spool"]
        calls = list(life.process.calls.names)
        has_happened = at < len(calls)
        try:
            if life.process.calls.is_gone:
                await life.restart()
            await life.check_what_is_readable()
            for _ in range(2):  # what the first finds left over, the second is rid of
                life.clock.advance(RETRIED_AFTER_MS)
                await life.live()
            await life.check_the_end()
        except BaseException as error:
            error.add_note(f"{event.value} call {at}: {calls[at] if has_happened else 'none'}")
            raise
        finally:
            await life.process.end()
        at += PARTS
    assert set(calls) >= CALLS


@pytest.mark.parametrize(
    ("at", "call"),
    [
        (17, "metadata.append"),
        (18, "store.copy_log_segment_data"),
        (20, "store.fetch_indexes"),
        (23, "metadata.append"),
    ],
)
async def test_a_deletion_inside_an_unfinished_copy_stops_nothing(at: int, call: str, tmp_path: Path) -> None:
    """The first copy fails when it has begun, and then a user deletes a part of its records."""
    life = Life(tmp_path)
    await life.process.open()
    life.process.calls.arm(at, Event.FAILED_AFTER)
    with contextlib.suppress(RemoteLogError):
        await life.live()
    assert life.process.calls.names[at] == call
    life.process.calls.disarm()
    life.log.log_start_offset = 5
    await life.process.metadata.put_log_start(PARTITION, LogStart(5, 0, LogStartReason.USER))
    for _ in range(2):
        life.clock.advance(RETRIED_AFTER_MS)
        await life.live()
    await life.check_what_is_readable()
    await life.check_the_end()
    await life.process.end()
