"""A writer as applications have it: small transactions, one after the other, on a connection that may be lost."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Final

import asyncpg

from relay.database import DRIVER_ERRORS

ROWS_A_COMMIT: Final = 8
ROWS_A_COMMIT_MAX: Final = 80
"""Of a writer that is late: a machine that is busy for a moment does not lower its rate."""

LATE_S_MAX: Final = 1.0
"""What a writer could not write for longer is not made up for, nor what an outage took: no flood follows it."""
_INSERT: Final = """
    INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id, payload)
    SELECT 'w' || n, 'ok.x', 'order', (n % $3)::text, '{}'
    FROM generate_series($1::int, $2::int) n
"""


class Load:
    """Commits rows over `keys` keys, `rows_s` a second by the clock while the server takes them, until stopped.

    `answered` are the ids whose COMMIT was answered: whatever happens, these are owed. A transaction whose answer
    was lost may be there or not; its ids are not used again.
    """

    def __init__(self, url: str, *, keys: int = 40, rows_s: float = 200.0) -> None:
        self._url = url
        self._keys = keys
        self._rows_s = rows_s
        self._next = 1
        self._began_at = 0.0
        self._began_with = 1
        """Since when, and from which row on, the rate is counted."""
        self._stopped = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.answered: list[str] = []

    async def __aenter__(self) -> Load:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Write no more; raises what went wrong in the writer itself. May be called again."""
        assert self._task is not None
        self._stopped.set()
        self._may_write.set()
        await asyncio.wait_for(self._task, 30)

    async def pause(self) -> None:
        """No transaction is open when it returns."""
        self._is_idle.clear()
        self._may_write.clear()
        await asyncio.wait_for(self._is_idle.wait(), 30)

    def pace(self, rows_s: float) -> None:
        """From now on. Few, for outages of minutes, whose backlog few keys drain one confirm at a time."""
        self._rows_s = rows_s
        self._count_anew()

    def _count_anew(self) -> None:
        self._began_at, self._began_with = time.monotonic(), self._next

    def _late_rows(self) -> int:
        """How many rows were to be written by now and are not."""
        owed = int((time.monotonic() - self._began_at) * self._rows_s)
        return owed - (self._next - self._began_with)

    def resume(self) -> None:
        self._may_write.set()

    async def _run(self) -> None:
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._count_anew()
        while not self._stopped.is_set():
            if not self._may_write.is_set():
                self._is_idle.set()
                await self._may_write.wait()
                self._count_anew()
                continue
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(self._url, timeout=3)
                rows = min(max(self._late_rows(), ROWS_A_COMMIT), ROWS_A_COMMIT_MAX)
                first, self._next = self._next, self._next + rows
                await connection.execute(_INSERT, first, self._next - 1, self._keys, timeout=3)
                self.answered += [f"w{n}" for n in range(first, self._next)]
            except DRIVER_ERRORS:
                # What the application would do: again, later. Its rows of this transaction are not owed.
                if connection is not None:
                    connection.terminate()
                    connection = None
                self._count_anew()
            await self._paced()
        if connection is not None:
            connection.terminate()

    async def _paced(self) -> None:
        """Until the next rows are to be written; at once when it is being stopped."""
        late = self._late_rows()
        if late > LATE_S_MAX * self._rows_s:
            self._count_anew()
        pause_s = (ROWS_A_COMMIT - late) / self._rows_s
        if pause_s <= 0:
            return
        try:
            await asyncio.wait_for(self._stopped.wait(), pause_s)
        except TimeoutError:
            return
