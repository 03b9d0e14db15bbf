"""What not every machine has."""

from __future__ import annotations

from typing import Final

import pytest

from bench import native
from bench.errors import Unavailable

NOT_INSTALLED: Final = ("no C compiler", "amqp.h", "-lrabbitmq")
"""How it shows that compiler, header or library is missing; a program that does not compile beside them is a fault."""


@pytest.fixture(scope="session")
def c_programs() -> None:
    """The benchmark's publisher and consumers in C, which `make setup` says it leaves out where they cannot be compiled."""
    try:
        for name in native.PROGRAMS:
            native.compiled(name)
    except Unavailable as missing:
        if any(words in str(missing) for words in NOT_INSTALLED):
            pytest.skip(str(missing))
        raise
