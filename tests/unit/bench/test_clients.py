"""What the clients of the benchmark send, and how they read the answers."""

from __future__ import annotations

import argparse

import pytest

from bench.clients.backfill_reader import Range
from bench.clients.librdkafka import Target, add_target, target_of
from bench.clients.lines import LineProcess
from bench.first_record import places_of
from bench.rig.stage import SEGMENT_BYTES, History


def test_seeks_go_to_different_segments() -> None:
    records = SEGMENT_BYTES // 1024
    history = History("t", Range(0, 0, 30 * records + 5))
    places = places_of(history, 25, seed=1)
    segments = [offset // records for _, offset in places]
    assert len(set(segments)) == len(segments) == 26
    assert all(0 <= offset < history.range.end for _, offset in places)
    assert places != places_of(history, 25, seed=2)


def test_a_target_survives_a_command_line() -> None:
    target = Target("a:1,b:2", "t", {"security.protocol": "ssl", "sasl.password": "x=y"})
    arguments = argparse.ArgumentParser()
    add_target(arguments)
    assert target_of(arguments.parse_args(target.arguments())) == target


def test_a_client_that_fails_says_why() -> None:
    """It cannot take an argument that it does not know."""
    with LineProcess("bench.clients.backfill_reader", ["--nonsense"]) as reader, pytest.raises(RuntimeError) as raised:
        reader.wait_for_lines()
    assert "--bootstrap" in str(raised.value)
