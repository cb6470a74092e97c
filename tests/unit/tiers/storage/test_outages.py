"""An outage of a store: when it begins and ends, and what the log says of it."""

from __future__ import annotations

import logging

import pytest

from tiers.errors import (
    CredentialsRefusedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.storage.outages import BEGINS_AFTER_MS, HANGS_AFTER_MS, REFUSED_AFTER_MS, StoreOutage

URL = "http://127.0.0.1:9000/tier/b602/hkUKqyc5Qvm0wzkswKSRNQ/cef6ec9d/0/00000000000000002000.log"
REFUSED = RetriableRemoteStorageError(f's3://tier/b602/x.log: EndpointConnectionError: no connection to "{URL}"')
FORBIDDEN = CredentialsRefusedError("s3://tier/x: 403 AccessDenied")


class Watched:
    def __init__(self) -> None:
        self.now_ms = 0
        self.outage = StoreOutage("", lambda: self.now_ms)

    def fail(self, at_ms: int, error: RemoteStorageError = REFUSED) -> int | None:
        self.now_ms = at_ms
        self.outage.failed(error)
        return self.outage.lasting_ms


def test_an_outage_begins_when_no_call_succeeds_for_a_while() -> None:
    store = Watched()
    assert store.fail(100) is None
    assert store.fail(99 + BEGINS_AFTER_MS) is None
    assert store.fail(100 + BEGINS_AFTER_MS) == BEGINS_AFTER_MS
    store.now_ms += 7
    assert store.outage.lasting_ms == BEGINS_AFTER_MS + 7


@pytest.mark.parametrize("has_object", [True, False])
def test_any_answer_ends_an_outage(has_object: bool) -> None:
    store = Watched()
    store.fail(0)
    assert store.fail(BEGINS_AFTER_MS) is not None
    if has_object:
        store.outage.answered()
    else:
        store.outage.failed(RemoteResourceNotFoundError("no such object"))
    assert store.outage.lasting_ms is None
    assert store.fail(2 * BEGINS_AFTER_MS) is None, "the time begins anew"


def test_refused_credentials_are_an_outage_later() -> None:
    store = Watched()
    assert store.fail(0, FORBIDDEN) is None
    assert store.fail(REFUSED_AFTER_MS - 1, FORBIDDEN) is None
    assert store.fail(REFUSED_AFTER_MS, FORBIDDEN) == REFUSED_AFTER_MS


def test_an_error_about_one_object_says_nothing() -> None:
    store = Watched()
    damaged = RemoteStorageError("412 PreconditionFailed")
    assert [store.fail(at_ms, damaged) for at_ms in (0, REFUSED_AFTER_MS)] == [None, None]


@pytest.mark.parametrize(("after_ms", "reason"), [(HANGS_AFTER_MS - 1, ""), (HANGS_AFTER_MS, "no answer in 4 s")])
def test_a_call_that_was_given_up_late_is_a_failure(after_ms: int, reason: str) -> None:
    store = Watched()
    for store.now_ms in (0, BEGINS_AFTER_MS):
        store.outage.given_up(after_ms)
    assert (store.outage.lasting_ms is not None, store.outage.reason) == (bool(reason), reason)


def test_the_log_has_one_line_at_the_beginning_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = Watched()
    for second in range(60):
        store.fail(second * 1000)
    store.outage.answered()
    store.outage.answered()
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [("ERROR", "the store does not answer"), ("INFO", "the store answers again")]
    assert vars(caplog.records[0])["location"] == "home"
