from __future__ import annotations

from typing import Any

import pytest

from proxy.config import TidegateConfig
from proxy.process.budgets import reader_share_of, remote_log_share_of, share_of
from tests.support.proxy.parsed_config import parse_config

BUDGETS = [
    ("limits", "max_connections"),
    ("limits", "max_unauthenticated_connections_per_address"),
    ("limits", "max_decoded_bytes"),
]


def settings(workers: int, more: str = "") -> TidegateConfig:
    chunk_files = "remote.log.chunk.file.cache.total.size.bytes = 1000000"
    return parse_config(f'workers = {workers}\n{chunk_files}\n[upstream]\nbootstrap.servers = "a:9092"\n{more}')


def budgets(config: TidegateConfig) -> dict[tuple[str, str], Any]:
    return {(section, name): getattr(getattr(config, section), name) for section, name in BUDGETS}


@pytest.mark.parametrize("workers", [1, 3, 1000])
def test_shares_add_up_to_the_whole_and_none_is_nothing(workers: int) -> None:
    whole = budgets(settings(workers))
    share = budgets(share_of(settings(workers)))
    assert share.keys() == whole.keys()
    for name, total in whole.items():
        assert share[name] > 0
        assert total <= share[name] * workers < total + workers


@pytest.mark.parametrize(("total", "shares"), [(0, (0, 0)), (1, (0, 1)), (1001, (500, 501)), (6000, (3000, 3000))])
def test_the_remote_log_process_and_the_reader_share_the_index_files(total: int, shares: tuple[int, int]) -> None:
    config = settings(3, '[storage]\nimplementation = "local"\npath = "/x"\n')
    config = config.model_copy(
        update={"remote_log": config.remote_log.model_copy(update={"index_file_cache_bytes": total})}
    )
    for share, size_bytes in zip((remote_log_share_of(config), reader_share_of(config)), shares, strict=True):
        assert share.remote_log.index_file_cache_bytes == size_bytes
        left = config.remote_log.model_copy(update={"index_file_cache_bytes": size_bytes})
        assert share == config.model_copy(update={"remote_log": left})


def test_no_limit_stays_no_limit() -> None:
    assert share_of(settings(3, "[limits]\nmax.connections = 0")).limits.max_connections == 0


def test_a_worker_differs_in_nothing_else() -> None:
    config = settings(2)
    share = share_of(config)
    assert share.listener == config.listener
    left = config.model_dump(exclude={"workers", "listener"})
    for section, name in BUDGETS:
        left[section][name] = getattr(getattr(share, section), name)
    assert share.model_dump(exclude={"workers", "listener"}) == left
