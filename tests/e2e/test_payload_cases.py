"""The bytes of a payload, from the row to the queue, among bystanders: as stored, whatever they are."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, Final

import pytest

from tests.e2e.bystanders import ONE_OR_TWO, arrived, insert_among, start
from tests.e2e.conftest import Site, command

PAYLOAD: Final = r'{"b":1,"a":2,"a":3,"n":1e400,"f":1.10,"u":"\u00e9","z":"\u0000"}'


async def migrate_anew(site: Site, kind: str) -> dict[str, Any]:
    """An outbox whose payloads are of that type; returns what a bystander's payload is there."""
    await site.database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    done = await asyncio.to_thread(lambda: command("migrate", "--payload", kind, settings=site.settings))
    assert done.returncode == 0, done.stderr
    return {"payload": b"{}" if kind == "bytea" else "{}"}


@ONE_OR_TWO
@pytest.mark.parametrize("kind", ["json", "text", "bytea", "jsonb"])
async def test_case_15_the_queue_has_the_stored_bytes(site: Site, relays: int, kind: str) -> None:
    """jsonb keeps no duplicates, no 1e400 as written and no \\u0000: there it is `payload::text`."""
    columns = await migrate_anew(site, kind)
    await start(site, relays)
    text = PAYLOAD if kind != "jsonb" else PAYLOAD.replace(r',"z":"\u0000"', "")
    good = await insert_among(
        site, [{"id": "m", "key": "k", "payload": text.encode() if kind == "bytea" else text}], **columns
    )
    await site.until("(SELECT sent_at IS NOT NULL FROM outbox WHERE id = 'm')")
    messages = await arrived(site, good, others=1)
    assert messages.keys() == {"m"}
    stored = text.encode()
    if kind == "jsonb":
        stored = (await site.database.fetchval("SELECT payload::text FROM outbox WHERE id = 'm'")).encode()
    assert hashlib.sha256(messages["m"].body).digest() == hashlib.sha256(stored).digest(), messages["m"].body


@ONE_OR_TWO
@pytest.mark.parametrize(
    ("kind", "payloads"),
    [
        ("json", {"null": (None, b""), "json null": ("null", b"null")}),
        ("jsonb", {"null": (None, b""), "json null": ("null", b"null")}),
        ("text", {"null": (None, b""), "empty": ("", b""), "word": ("null", b"null")}),
        ("bytea", {"null": (None, b""), "empty": (b"", b""), "byte": (b"\x00", b"\x00")}),
    ],
)
async def test_case_16_null_and_empty_payloads(
    site: Site, relays: int, kind: str, payloads: dict[str, tuple[Any, bytes]]
) -> None:
    """SQL NULL and empty bodies are empty messages, the JSON null is four bytes; the content type tells the rest."""
    columns = await migrate_anew(site, kind)
    await start(site, relays)
    rows = [{"id": name, "key": name, "payload": payload} for name, (payload, _) in payloads.items()]
    good = await insert_among(site, rows, **columns)
    await site.all_sent()
    messages = await arrived(site, good, others=len(rows))
    assert {name: message.body for name, message in messages.items()} == {
        name: body for name, (_, body) in payloads.items()
    }
    content_type = {"text": "text/plain", "bytea": "application/octet-stream"}.get(kind, "application/json")
    assert {message.content_type for message in messages.values()} == {content_type}
