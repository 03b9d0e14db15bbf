"""One look of `relay status --watch`: at the database, and at the relay that answers beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relay import admin, scrape
from relay.config import Config
from relay.errors import DatabaseError
from relay.live import View


async def look(config: Config, view: View, redact: Callable[[str], str] = str) -> None:
    """Bring the view up to date. Once it has shown something, a database that is away is trouble, not the end: the view
    keeps its last numbers and says so. Raises what `admin.status` raises at the first look.
    """
    asked = asyncio.to_thread(scrape.scrape, view.source) if view.source is not None else _nothing()
    (now, found) = await asyncio.gather(_status(config, view, redact), asked)
    if now is not None:
        view.take(now)
    before = view.scrape
    view.pace = None if before is None or found is None else scrape.pace(before, found)
    view.scrape = found


async def _nothing() -> None:
    return None


async def _status(config: Config, view: View, redact: Callable[[str], str]) -> admin.Status | None:
    try:
        return await admin.status(config, since=view.status)
    except DatabaseError as error:
        if view.status is None:
            raise
        view.trouble = redact(error.message)
        return None
