"""Who reads the remote tier: bounded accounts that lose no byte."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tiers.reader import read_accounts
from tiers.reader.read_accounts import IDLE_MS, MAX_ID_CHARS, OTHERS, RATE_MS, ReadAccounts


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_accounts, "MAX_CLIENTS", 2)
    monkeypatch.setattr(read_accounts, "MAX_TOPICS", 2)


class Accounts(ReadAccounts):
    def __init__(self) -> None:
        self.now_ms = 1_000_000
        super().__init__(lambda: self.now_ms)

    def read(self, client: str, topic: str = "t", size_bytes: int = 10) -> None:
        self.note_read(client, topic, size_bytes, is_cache_hit=False)

    @property
    def totals(self) -> dict[tuple[str, str], int]:
        return {(each.client_id, each.topic): each.size_bytes for each in self.accounts()}


def test_an_account_counts_bytes_hits_and_throttled_reads() -> None:
    accounts = Accounts()
    accounts.read("app", "orders", 600)
    accounts.note_read("app", "orders", 300, is_cache_hit=True)
    accounts.note_throttled("app", "orders")
    (account,) = accounts.accounts()
    assert (account.reads, account.size_bytes, account.cache_hits, account.throttled) == (2, 900, 1, 1)
    assert accounts.total_bytes == 900


def test_the_rate_is_that_of_the_last_minute() -> None:
    accounts = Accounts()
    for _ in range(12):
        accounts.read("app", size_bytes=5_000)
        accounts.now_ms += 5_000
    (account,) = accounts.accounts()
    assert account.bytes_per_second(accounts.now_ms) == 11 * 5_000 * 1000 / RATE_MS
    assert account.bytes_per_second(accounts.now_ms + RATE_MS) == 0


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        ([(name, "t") for name in "abcd"], {("a", "t"): 10, ("b", "t"): 10, (OTHERS, "t"): 20}),
        ([("a", topic) for topic in "tuvw"], {("a", "t"): 10, ("a", "u"): 10, ("a", OTHERS): 20}),
        ([("x" * MAX_ID_CHARS + end, "t") for end in "ab"], {("x" * MAX_ID_CHARS, "t"): 20}),
    ],
    ids=["clients beyond the limit", "topics beyond the limit", "long client ids"],
)
def test_names_without_an_account_of_their_own_share_one(
    reads: list[tuple[str, str]], found: dict[tuple[str, str], int]
) -> None:
    accounts = Accounts()
    for client, topic in reads:
        accounts.read(client, topic)
    assert accounts.totals == found


def test_any_number_of_client_ids_makes_a_bounded_number_of_series() -> None:
    accounts = Accounts()
    registry = CollectorRegistry()
    registry.register(accounts)
    for number in range(500):
        accounts.read(f"client-{number}", f"topic-{number % 10}", 1)
        accounts.now_ms += IDLE_MS // 3
    samples = [each for family in registry.collect() for each in family.samples]
    read = [each for each in samples if each.name == "tidegate_remote_client_read_bytes_total"]
    assert len(read) <= 3 * 3
    assert sum(each.value for each in read) == 500
