"""What `relay parked` says and how it ends, through the installed command."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess

import pytest

from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, Site, command, environment
from tests.e2e.operator import bind, document, relay, state


async def park(site: Site, *ids: str) -> None:
    """Parked rows without a relay."""
    for id_ in ids:
        await site.insert(id_, "nope.x", f"K{id_}")
    await site.database.execute(
        "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now(), attempts = 5, failure_class = 'unroutable',"
        " failure_error = '312 NO_ROUTE' WHERE id = ANY ($1)", list(ids),
    )  # fmt: skip


async def test_list_and_show_for_people(site: Site) -> None:
    await park(site, "m1", "m2")
    done = await relay(site, "parked", "list")
    assert (done.returncode, done.stderr) == (0, "")
    head, first, *_, last = done.stdout.splitlines()
    assert head.split() == ["SEQ", "ID", "TYPE", "KEY", "CLASS", "TRIES", "PARKED", "AT", "ERROR"]
    assert first.split()[:6] == ["1", "m1", "nope.x", "Km1", "unroutable", "5"]
    assert last == "2 rows: unroutable 2"
    done = await relay(site, "parked", "show", "m1")
    assert "payload" not in done.stdout
    lines = (await relay(site, "parked", "show", "m1", "--payload")).stdout.splitlines()
    assert ["payload", '{"n":1}'] in [line.split() for line in lines]


async def test_json_has_stable_keys(site: Site) -> None:
    await park(site, "m1", "m2", "m3")
    found = await document(site, "parked", "list", "--limit", "1")
    assert found.keys() == {"table", "observed_at", "matched", "matched_by_class", "expired", "rows"}
    assert (found["matched"], len(found["rows"])) == (3, 1)
    assert found["rows"][0].keys() == {
        "id", "seq", "state", "event_type", "aggregate_type", "aggregate_id", "failure_class", "error", "attempts",
        "parked_at", "is_expired",
    }  # fmt: skip
    keys = {
        "action",
        "table",
        "role",
        "dry_run",
        "matched",
        "done",
        "expired",
        "changed",
        "locked",
        "refused",
        "republished",
    }
    dry = await document(site, "parked", "redrive", "--all", "--dry-run")
    assert dry.keys() == {*keys, "rows"}
    assert (dry["dry_run"], dry["done"], await state(site, "m1")) == (True, 3, "parked")
    done = await document(site, "parked", "discard", "--id", "m1", "--yes")
    assert done.keys() == keys
    assert (done["action"], done["done"], done["role"]) == ("discard", 1, "postgres")


async def test_an_action_is_one_log_line(site: Site) -> None:
    await park(site, "m1", "m2", "m3")
    done = await relay(site, "parked", "redrive", "--type", "nope.x", "--error", "NO_ROUTE", "--limit", "2")
    assert done.returncode == 0
    assert done.stdout == "2 rows of 3 redriven\n"
    (line,) = (json.loads(text) for text in done.stderr.splitlines())
    assert line.items() >= {
        "event": "parked_redriven", "role": "postgres", "rows": 2, "table": "public.outbox",
        "filter": {"type": ["nope.x"], "error": ["NO_ROUTE"]},
    }.items()  # fmt: skip
    done = await relay(site, "parked", "discard", "--all", "--yes")
    (line,) = (json.loads(text) for text in done.stderr.splitlines())
    assert (line["event"], line["rows"], line["filter"]) == ("parked_discarded", 1, "all")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_action_that_is_interrupted_says_how_far_it_came(site: Site, number: signal.Signals) -> None:
    every = [f"m{n}" for n in range(8)]
    await park(site, *every)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "parked", "redrive", "--all", "--rate", "2/s",
        env=environment(site.settings), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip

    async def has_begun() -> bool:
        return await state(site, "m0") != "parked"

    try:
        await eventually(has_begun, 20)
        process.send_signal(number)
        _, said = await asyncio.wait_for(process.communicate(), 20)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 1
    line = json.loads(said.splitlines()[0])
    assert (line["event"], line["role"]) == ("parked_redriven", "postgres")
    assert line["rows"] == len(every) - [await state(site, id_) for id_ in every].count("parked") < len(every)


async def test_what_the_output_has_no_letters_for_is_shown_by_numbers(site: Site) -> None:
    """A cron job's output, a pipe with LC_ALL=C."""
    await park(site, "zo\N{LATIN SMALL LETTER E WITH DIAERESIS}")

    def listed(*more: str) -> bytes:
        done = subprocess.run(
            [*COMMAND, "parked", "list", *more],
            env={**environment(site.settings), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert rb"zo\xeb" in await asyncio.to_thread(listed)
    (row,) = json.loads(await asyncio.to_thread(listed, "--json"))["rows"]
    assert row["id"] == "zo\N{LATIN SMALL LETTER E WITH DIAERESIS}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("redrive",), "without a filter: name one, or --all"),
        (("discard", "--yes"), "without a filter: name one, or --all"),
        (("redrive", "--limit", "5"), "without a filter: name one, or --all"),
        (("redrive", "--all", "--type", "x"), "--all with a filter"),
        (("discard", "--all"), "--yes"),
        (
            ("redrive", "--all", "--rate", "50"),
            "--rate 50: not a rate; allowed: a number and a unit: 50/s 600/m 1000/h",
        ),
        (("list", "--since", "soon"), "--since soon: not a time; allowed: a duration"),
        (("list", "--limit", "0"), "--limit 0: not a number of rows; allowed: a whole number"),
        (("list", "--limit", "9" * 19), ": not a number of rows; allowed: a whole number"),
        (("list", "--since", "0001-01-01T00:00:00+23:00"), "--since 0001-01-01T00:00:00+23:00: in UTC no time of"),
        (("redrive", "--since", "9999-12-31T23:59:59-01:00"), "in UTC no time of the years 1 to 9999; allowed: a"),
        (("list", "--since", "infinity"), "--since infinity: not a time; allowed: a duration before now"),
        (("list", "--since", "36501d"), "7d, at most a hundred years)"),
        (("list", "--id", "m", "--id", "a\udcff"), "--id a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("redrive", "--key", "a\udcff"), "--key a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("discard", "--type", "a\udcff", "--yes"), "--type a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("list", "--error", "a\udcff"), "--error a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("redrive", "--since", "a\udcff"), "--since a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("show", "a\udcff"), "ID a\\udcff: not UTF-8; allowed: text in UTF-8"),
        (("show", ""), "ID: an empty text; allowed: a message id, as `relay parked list` shows it"),
        (("list", "--id", ""), "--id: an empty text; allowed: any other, or leave the option out"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = command("parked", *arguments, settings={"RELAY_DATABASE_URL": "postgresql://127.0.0.1:1/x"})
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["parked", "parked list", "parked show", "parked redrive", "parked discard", "pause"])
def test_every_command_has_help(name: str) -> None:
    done = command(*name.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")


async def test_nothing_matched_exits_4(site: Site) -> None:
    await site.insert("m", "ok.x")
    for arguments in (
        ("list",),
        ("list", "--type", "none", "--json"),
        ("redrive", "--all"),
        ("redrive", "--key", "none", "--dry-run"),
        ("discard", "--error", "none", "--yes"),
    ):
        done = await relay(site, "parked", *arguments)
        assert done.returncode == 4, arguments
        assert "no parked row of public.outbox matches" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for text in ("redrive --id m", "discard --id m --yes", "show m"):
        done = await relay(site, "parked", *text.split())
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr == "relay: m is not parked: pending, a relay publishes it as soon as it can\n"


@pytest.mark.parametrize(
    ("arguments", "code", "counts"),
    [
        (("redrive", "--all", "--limit", "2"), 0, (5, 2, 2)),
        (("redrive", "--all"), 0, (5, 3, 2)),
        (("redrive", "--all", "--ignore-expiry", "--limit", "3"), 0, (5, 3, 0)),
        (("redrive", "--id", "e1", "--id", "e2"), 4, (2, 0, 2)),
        (("redrive", "--key", "none"), 4, (0, 0, 0)),
        (("discard", "--all", "--yes", "--limit", "3"), 0, (5, 3, 0)),
        (("discard", "--id", "e1", "--yes"), 0, (1, 1, 0)),
    ],
)
async def test_a_dry_run_says_what_the_real_one_does(
    site: Site, arguments: tuple[str, ...], code: int, counts: tuple[int, int, int]
) -> None:
    """Rows past their deadline used up the real run's limit and not the dry one's, and the exit codes differed."""
    await park(site, "e1", "e2", "m1", "m2", "m3")
    await site.database.execute("UPDATE outbox SET expires_at = '1970-01-01' WHERE id IN ('e1', 'e2')")
    dry, real = [await relay(site, "parked", *arguments, *last, "--json") for last in (("--dry-run",), ())]
    found, done = json.loads(dry.stdout), json.loads(real.stdout)
    assert (dry.returncode, real.returncode) == (code, code)
    assert (done["matched"], done["done"], done["expired"]) == counts
    rows = found.pop("rows")
    assert found == {**done, "dry_run": True}
    changed = await site.database.fetch(
        "SELECT id FROM unnest($1::text[]) id WHERE id NOT IN (SELECT id FROM outbox WHERE aside = 'parked')",
        ["e1", "e2", "m1", "m2", "m3"],
    )
    assert [row["id"] for row in rows] == [record["id"] for record in changed]


async def test_expired_rows_alone_exit_4_and_say_how(site: Site) -> None:
    await park(site, "m1")
    await site.database.execute("UPDATE outbox SET expires_at = '1970-01-01'")
    for last in (("--dry-run",), ()):
        done = await relay(site, "parked", "redrive", "--all", *last)
        assert done.returncode == 4
        assert "1 row past their deadline left: --ignore-expiry redrives them" in done.stdout
    done = await relay(site, "parked", "redrive", "--all", "--ignore-expiry")
    assert done.returncode == 0
    await bind(site, "nope.x")
    site.start()
    await site.all_sent()


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n", 1, 2), (b"", 1, 2), (b"\xff", 1, 2), (b"Yes ", 0, 0)])
async def test_discard_asks_on_a_terminal(site: Site, answer: bytes, code: int, left: int) -> None:
    await park(site, "m1", "m2")
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "parked", "discard", "--all",
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**environment(site.settings), "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    os.close(theirs)
    assert process.stderr is not None
    asked = await asyncio.wait_for(process.stderr.readuntil(b"[y/N] "), 20)
    assert b"delete 2 rows of public.outbox for good?" in asked
    os.write(ours, answer + b"\n")
    said = await asyncio.wait_for(process.stderr.read(), 20)
    await asyncio.wait_for(process.wait(), 20)
    os.close(ours)
    assert process.returncode == code
    assert code == 0 or said == b"relay: nothing was discarded\n"
    assert await site.database.fetchval("SELECT count(*) FROM outbox") == left


async def test_an_operator_needs_no_more_than_the_least_role(site: Site, postgres_server: PostgresServer) -> None:
    role = f"op_{os.getpid()}"
    await site.database.execute(f"CREATE ROLE {role} LOGIN")
    assert (await relay(site, "migrate", "--role", role)).returncode == 0
    await park(site, "m1", "m2")
    url = postgres_server.url(site.database_url.rpartition("/")[2], user=role)
    for arguments in (
        ("parked", "list"),
        ("parked", "show", "m1", "--payload"),
        ("parked", "redrive", "--id", "m1", "--ignore-expiry"),
        ("parked", "discard", "--id", "m2", "--yes"),
        ("pause",),
        ("resume",),
    ):
        done = await relay(site, *arguments, database_url=url)
        assert done.returncode == 0, done.stderr
    await site.database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
