"""One database and one broker of the simulation, for tests of the fakes themselves."""

from __future__ import annotations

import asyncio
import random

from .broker import BrokerOptions, Rabbit
from .database import Database
from .loop import VirtualLoop
from .oracle import History, Oracle
from .tables import DatabaseOptions
from .wire import Network


class Bench:
    """One database and broker without a relay."""

    def __init__(self, options: DatabaseOptions | None = None, broker: BrokerOptions | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.history = History(loop.time)
        self.oracle = Oracle(self.history)
        self.database = Database(loop, random.Random(1), self.oracle, self.history, options or DatabaseOptions())
        self.network = Network()
        self.rabbit = Rabbit(loop, random.Random(2), self.oracle, self.history, broker or BrokerOptions())
