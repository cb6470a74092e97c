from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.jars import ServerUnavailable
from tests.servers.versitygw import VersityGateway


@pytest.fixture(scope="session")
def s3_server() -> Iterator[VersityGateway]:
    """A real S3 server; every test makes a bucket of its own."""
    try:
        server = VersityGateway()
        server.start()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    try:
        yield server
    finally:
        server.stop()
