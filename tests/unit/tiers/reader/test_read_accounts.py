"""Who reads the remote tier: bounded accounts that lose no byte."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tiers.reader.read_accounts import IDLE_MS, MAX_ID_CHARS, OTHERS, RATE_MS, ReadAccountMetrics, ReadAccounts


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def totals(accounts: ReadAccounts) -> dict[tuple[str, str], int]:
    return {(each.client_id, each.topic): each.size_bytes for each in accounts.accounts()}


def test_an_account_counts_bytes_hits_and_throttled_reads() -> None:
    accounts = ReadAccounts(Clock())
    accounts.note_read("app", "orders", 600, is_cache_hit=False)
    accounts.note_read("app", "orders", 300, is_cache_hit=True)
    accounts.note_throttled("app", "orders")
    (account,) = accounts.accounts()
    assert (account.reads, account.size_bytes, account.cache_hits, account.throttled) == (2, 900, 1, 1)
    assert accounts.total_bytes == 900


def test_the_rate_is_that_of_the_last_minute() -> None:
    clock = Clock()
    accounts = ReadAccounts(clock)
    for _ in range(12):
        accounts.note_read("app", "orders", 5_000, is_cache_hit=False)
        clock.ms += 5_000
    (account,) = accounts.accounts()
    assert account.bytes_per_second(clock.ms) == 11 * 5_000 * 1000 / RATE_MS
    clock.ms += RATE_MS
    assert account.bytes_per_second(clock.ms) == 0


@pytest.mark.parametrize(
    ("limits", "reads", "found"),
    [
        ({"max_clients": 2}, [(name, "t") for name in "abcd"], {("a", "t"): 10, ("b", "t"): 10, (OTHERS, "t"): 20}),
        ({"max_topics": 2}, [("a", topic) for topic in "tuvw"], {("a", "t"): 10, ("a", "u"): 10, ("a", OTHERS): 20}),
        ({}, [("x" * MAX_ID_CHARS + end, "t") for end in "ab"], {("x" * MAX_ID_CHARS, "t"): 20}),
    ],
    ids=["clients beyond the limit", "topics beyond the limit", "long client ids"],
)
def test_names_without_an_account_of_their_own_share_one(
    limits: dict[str, int], reads: list[tuple[str, str]], found: dict[tuple[str, str], int]
) -> None:
    accounts = ReadAccounts(Clock(), **limits)
    for client, topic in reads:
        accounts.note_read(client, topic, 10, is_cache_hit=False)
    assert totals(accounts) == found


def test_an_idle_client_gives_its_place_and_its_bytes_away() -> None:
    clock = Clock()
    accounts = ReadAccounts(clock, max_clients=2)
    accounts.note_read("idle", "orders", 10, is_cache_hit=False)
    clock.ms += IDLE_MS
    accounts.note_read("busy", "orders", 20, is_cache_hit=False)
    accounts.note_read("new", "orders", 40, is_cache_hit=False)
    assert totals(accounts) == {("busy", "orders"): 20, ("new", "orders"): 40, (OTHERS, "orders"): 10}
    assert accounts.total_bytes == 70


def test_the_client_that_is_idle_the_longest_gives_its_place() -> None:
    clock = Clock()
    accounts = ReadAccounts(clock, max_clients=2)
    for client in ("first", "second"):
        accounts.note_read(client, "orders", 10, is_cache_hit=False)
    clock.ms += IDLE_MS
    accounts.note_read("first", "payments", 10, is_cache_hit=False)
    accounts.note_read("new", "orders", 40, is_cache_hit=False)
    assert {each.client_id for each in accounts.accounts()} == {"first", "new", OTHERS}


def test_any_number_of_client_ids_makes_a_bounded_number_of_series() -> None:
    clock = Clock()
    accounts = ReadAccounts(clock, max_clients=5, max_topics=3)
    registry = CollectorRegistry()
    registry.register(ReadAccountMetrics(accounts))
    for number in range(500):
        accounts.note_read(f"client-{number}", f"topic-{number % 10}", 1, is_cache_hit=False)
        clock.ms += IDLE_MS // 3
    samples = [each for family in registry.collect() for each in family.samples]
    read = [each for each in samples if each.name == "tidegate_remote_client_read_bytes_total"]
    assert len(read) <= 6 * 4
    assert sum(each.value for each in read) == 500
