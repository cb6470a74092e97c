"""Stories of copies that do not finish: no crash, outage or full disk costs the only copy of a record."""

from __future__ import annotations

from protocol.errors import ErrorCode
from tests.support.simulation.expectation import Retention
from tests.support.simulation.process import SimMachine
from tests.support.simulation.stories import MINUTE_S, Story, story
from tiers.storage.object_key import parse_segment_key


@story()
async def a_store_refuses_what_it_has_taken(on: Story) -> None:
    """The store takes both objects of a segment, and refuses GET and DELETE for 6 minutes."""
    await on.produce(16)
    await on.copied_to(8)
    segment = await on.next_segment()
    on.refuse(lambda verb, key: verb in ("GET", "DELETE"))
    await on.passes(2 * MINUTE_S)
    on.retention_removes(segment.next_offset)
    await on.passes(4 * MINUTE_S)
    on.accept_all()
    await on.passes(6 * MINUTE_S)
    on.require_kept(segment)
    await on.require_readable()


@story(total=None)
async def a_kill_before_the_end_of_a_copy(on: Story) -> None:
    """A process is killed before it finishes a whole copy, and the broker removes its first record."""
    await on.produce(16)
    await on.copied_to(8)
    segment = await on.next_segment()
    on.kill()
    on.retention_removes(segment.first + 1)
    await on.start()
    await on.produce(24)
    await on.copied_to(on.end - 8)
    await on.require_readable(segment.first + 1)


@story()
async def a_kill_before_the_end_of_a_copy_with_a_total(on: Story) -> None:
    """The same, and the topic has a total of its own: the removed record is in the store alone."""
    await on.produce(16)
    await on.copied_to(8)
    segment = await on.next_segment()
    on.kill()
    on.retention_removes(segment.first + 1)
    await on.start()
    await on.produce(24)
    await on.copied_to(on.end - 8)
    on.require_kept(segment)
    await on.require_readable()


@story(processes=2)
async def a_rolling_restart_before_the_end_of_a_copy(on: Story) -> None:
    """All processes restart cleanly after a copy is whole, and the broker removes its first record."""
    await on.produce(16)
    await on.copied_to(8)
    segment = await on.next_segment()
    on.refuse(lambda verb, key: verb == "GET" and key in segment.keys)
    for machine in on.machines:
        machine.stop()
    await on.until("the processes do not stop", lambda: all(one.process is None for one in on.machines))
    on.retention_removes(segment.first + 1)
    on.accept_all()
    await on.start()
    await on.produce(24)
    await on.copied_to(on.end - 8)
    await on.require_readable()


@story()
async def a_kill_before_the_end_of_the_first_copy(on: Story) -> None:
    """A process is killed before it finishes the first copy of a partition, and the broker removes its first record."""
    segment = await on.next_segment()
    on.kill()
    on.retention_removes(segment.first + 1)
    consumer = on.watch(0)
    await on.start()
    await on.produce(24)
    await on.copied_to(on.end - 8)
    consumer.require_no_reset()
    on.require_kept(segment)
    await on.require_readable()


@story()
async def a_whole_copy_found_while_the_broker_has_its_records(on: Story) -> None:
    """A new process finds a whole copy, and the broker removes its records right after the first look at it."""
    await on.produce(16)
    await on.copied_to(8)
    segment = await on.next_segment()
    on.kill()
    starting = on.begin(on.start())
    await on.served(lambda verb, key: segment if key in segment.keys else None)
    on.retention_removes(segment.next_offset)
    await starting
    await on.produce(24)
    await on.copied_to(on.end - 8)
    on.require_kept(segment)
    await on.require_readable()


@story()
async def a_pause_after_a_failed_attempt(on: Story) -> None:
    """The store refuses one PUT, then every DELETE, and the broker removes the records before the next attempt."""
    await on.produce(16)
    await on.copied_to(8)
    refused: list[str] = []

    def refuses(verb: str, key: str) -> bool:
        if verb == "PUT" and parse_segment_key(key) is not None and not refused:
            refused.append(key)
            return True
        return verb == "DELETE"

    on.refuse(refuses)
    first = on.end
    await on.produce(16)
    await on.until("no PUT is refused", lambda: bool(refused))
    await on.passes(MINUTE_S)
    on.retention_removes(first)
    await on.passes(MINUTE_S)
    on.accept_all()
    await on.copied_to(first, within_s=20 * MINUTE_S)
    await on.require_readable()


async def _last_copy_in_a_spool(on: Story) -> tuple[int, int, SimMachine]:
    """Ends the member whose spool has the last copy of an announced segment. Returns its offsets, and the other."""
    await on.produce(16)
    await on.copied_to(8)
    on.refuse(lambda verb, key: verb == "PUT")
    await on.produce(16)
    await on.until("no member keeps a segment", lambda: any(map(on.kept, on.machines)))
    first, next_offset = min(kept for machine in on.machines for kept in on.kept(machine))
    member = next(machine for machine in on.machines if on.kept(machine))
    await on.passes(10.0)  # until the segment is announced
    member.crash()
    on.retention_removes(next_offset)
    on.accept_all()
    return first, next_offset, next(machine for machine in on.machines if machine is not member)


@story(processes=2)
async def a_member_that_has_the_last_copy_restarts(on: Story) -> None:
    """The member whose spool has the last copy of records is down for 3 minutes, and the other one takes over."""
    first, next_offset, other = await _last_copy_in_a_spool(on)
    await on.passes(3 * MINUTE_S)
    assert await on.fetch_code(first, other) not in (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE)
    await on.start()
    await on.copied_to(next_offset)
    await on.require_readable()


@story(processes=2)
async def a_member_that_had_the_last_copy_does_not_come_back(on: Story) -> None:
    """The same, and the disk of that member is lost: after some minutes a consumer goes on behind the records."""
    first, _, other = await _last_copy_in_a_spool(on)
    await on.passes(15 * MINUTE_S)
    assert await on.fetch_code(first, other) == ErrorCode.NONE


@story(is_encrypted=True)
async def a_full_disk_before_the_encryption(on: Story) -> None:
    """The spool's disk has no room to encrypt the only copy of records that the broker removed."""
    await on.produce(16)
    await on.copied_to(8)
    first = on.copied_end

    def refuses(verb: str, key: str) -> bool:
        if verb == "PUT":
            on.retention_removes(first + 4)
        return verb == "PUT"

    on.refuse(refuses)
    await on.produce(16)
    await on.passes(5.0)
    on.machine.is_spool_full = True
    on.accept_all()
    await on.passes(MINUTE_S)
    on.machine.is_spool_full = False
    await on.passes(10 * MINUTE_S)
    await on.copied_to(first + 4)
    await on.require_readable()


_MINUTE_MS = 60_000
_TEN_KILOBYTES = Retention(-1, 10_000)
_SLOW = {"segment.bytes": 20_000, "segment.ms": 86_400_000}


@story(broker_retention=_TEN_KILOBYTES, topic=_SLOW)
async def a_burst_of_large_records_after_small_ones(on: Story) -> None:
    """Large records follow many small ones, and the brokers keep 10,000 bytes, which are not the total."""
    await _many_small_then_large(on)


@story(broker_retention=_TEN_KILOBYTES, topic=_SLOW)
async def a_burst_of_large_records_of_an_unknown_size(on: Story) -> None:
    """The same, and no broker answers the sizes of its logs."""
    on.cluster.hides_sizes = True
    await _many_small_then_large(on)


@story(broker_retention=_TEN_KILOBYTES, topic={**_SLOW, "local.retention.bytes": 0})
async def a_burst_of_large_records_with_trims(on: Story) -> None:
    """The same, and the owner trims what is copied, and restarts during the burst."""
    await _many_small_then_large(on, restarts=True)


async def _many_small_then_large(on: Story, *, restarts: bool = False) -> None:
    await on.produce(40, value_bytes=8)
    await on.passes(MINUTE_S)
    for number in range(60):
        await on.produce(1, value_bytes=500)
        await on.passes(1.0)
        if restarts and number == 20:
            await on.roll()
    await on.passes(MINUTE_S)
    await on.require_readable()


@story(broker_retention=Retention(3 * _MINUTE_MS, -1))
async def an_outage_that_is_longer_than_the_brokers_retention(on: Story) -> None:
    """The brokers keep three minutes, which are not the total, and the store refuses segments for eight minutes."""
    on.refuse(lambda verb, key: verb == "PUT")
    for _ in range(16):
        await on.produce(16)
        await on.passes(MINUTE_S / 2)
    on.accept_all()
    await on.copied_to(on.end - 8, within_s=20 * MINUTE_S)
    await on.require_readable()


@story(broker_retention=Retention(-1, -1), topic={"remote.copy.lag.ms": 2 * _MINUTE_MS})
async def a_lag_behind_which_copies_keep_up(on: Story) -> None:
    """Records are copied two minutes after they were produced, a segment in each half minute."""
    for _ in range(15):
        await on.produce(8)
        await on.passes(MINUTE_S / 2)
    await on.copied_to(on.end - 56, within_s=1.0)
    await on.require_readable()


@story(total=None, broker_retention=Retention(60 * _MINUTE_MS, -1), topic={"local.retention.ms": -2})
async def a_backfill_behind_a_copy_that_is_not_known(on: Story) -> None:
    """A copy cannot be read back for a while, and the records behind it are older than the retention."""
    await on.passes(10.0)
    on.refuse(lambda verb, key: verb == "GET" and (at := parse_segment_key(key)) is not None and at.base_offset == 0)
    await on.produce(8)
    await on.produce(40, age_ms=120 * _MINUTE_MS)
    await on.produce(4)
    await on.passes(40.0)
    on.accept_all()
    await on.passes(2 * MINUTE_S)
    await on.require_readable()


@story(broker_retention=Retention(3 * _MINUTE_MS, -1))
async def a_hole_and_an_outage(on: Story) -> None:
    """The brokers remove records while no proxy runs, and then the store does not answer for four minutes."""
    await on.produce(16)
    await on.copied_to(16)
    on.kill()
    await on.produce(8)
    await on.passes(4 * MINUTE_S)
    on.refuse(lambda verb, key: True)
    first = on.end
    await on.start()
    for _ in range(8):
        await on.produce(8)
        await on.passes(MINUTE_S / 2)
    on.accept_all()
    await on.passes(4 * MINUTE_S)
    await on.require_readable(first)
