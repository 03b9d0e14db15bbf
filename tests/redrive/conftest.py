"""Fixtures of this part."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.servers import RabbitServer
from tests.vhost import Vhost


@pytest.fixture
def broker(rabbit_server: RabbitServer, amqp_url: str, tmp_path: Path) -> Vhost:
    return Vhost(rabbit_server, amqp_url, tmp_path)
