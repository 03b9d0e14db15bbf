"""Roles of PostgreSQL that a test makes, and that are gone after it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

_numbers = itertools.count(1)


@asynccontextmanager
async def login_role(database: asyncpg.Connection, options: str = "") -> AsyncIterator[str]:
    """One that may log in, with no rights yet; what it has in this database goes with it."""
    role = f"role_{os.getpid()}_{next(_numbers)}"
    await database.execute(f"CREATE ROLE {role} LOGIN {options}")
    try:
        yield role
    finally:
        await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
