from __future__ import annotations

import pytest

from proxy.wire.server import bind


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(OSError, match=r"a\.b\.invalid:9092: "):
        bind("a.b.invalid", 9092, reuse_port=False)
