"""Rows as the database gives them: how large they are, and what then fits into memory."""

from __future__ import annotations

from typing import Any

import pytest

from relay.message import Row
from relay.rows import page_rows
from tests.core.parts import Parts

RARE = '{"tracestate": "seen"}'


def read(seq: int = 1, *, body: bytes | None = b"12", size: int | None = None, rare: str | None = None,
         headers: str | None = None) -> Row:  # fmt: skip
    columns = ("(0,1)", seq, f"m{seq}", "ok", "t", f"k{seq}", body, size, 1.0, 1.0, rare, headers, 0)
    (row,) = page_rows([(None, 0, *columns)])
    return row


@pytest.mark.parametrize(
    ("columns", "size"),
    [
        ({}, 2),
        ({"body": None}, 0),
        ({"headers": '{"h": 1}'}, 10),
        ({"rare": RARE}, 2 + len(RARE)),
        ({"rare": RARE, "headers": '{"h": 1}', "body": None}, 8 + len(RARE)),
    ],
)
def test_a_row_is_as_large_as_all_that_it_holds(columns: dict[str, Any], size: int) -> None:
    row = read(**columns)
    assert (row.size, row.is_loaded) == (size, True)


def test_of_a_row_that_stayed_behind_the_database_says_how_large_it_is() -> None:
    row = read(body=None, size=100_000, rare=RARE)
    assert (row.size, row.is_loaded, row.rare) == (100_000, False, {"tracestate": "seen"})


def test_headers_take_up_the_room_for_reading_ahead() -> None:
    """3,000 rows with headers of 100 KB left room for 1,000 more."""
    parts = Parts()
    free = parts.reader._room()
    headers = '{"h": "' + "x" * 8000 + '"}'
    parts.engine.admit([read(seq, headers=headers) for seq in range(1, 3001)])
    assert parts.engine.chains.bytes == 3000 * (2 + 8009)
    left = parts.engine.settings.bytes_max // 2 - parts.engine.chains.bytes
    assert left // parts.engine.inline_bytes < 2000
    assert 0 < parts.reader._room() <= left // parts.engine.inline_bytes < free
