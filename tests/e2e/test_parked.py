"""`relay parked`, `pause` and `resume` through the installed command, beside relays that work."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
from typing import Any

import aio_pika
import pytest

from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, Daemon, Site, command, environment
from tests.e2e.ledger import drain

FEW_TRIES = {"retry_delays": "100ms", "lease": "2s"}


async def relay(site: Site, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A command to its end; without a terminal."""
    extra = {f"RELAY_{name.upper()}": value for name, value in settings.items()}
    return await asyncio.to_thread(lambda: command(*arguments, settings={**site.settings, **extra}))


async def document(site: Site, *arguments: str) -> dict[str, Any]:
    done = await relay(site, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def start(site: Site, relays: int, **settings: str) -> list[Daemon]:
    """So many relays that share the shards."""
    daemons = [await site.start(name=f"r{n}", **FEW_TRIES, **settings).ready() for n in range(relays)]
    await eventually(lambda: all(d.metric("relay_shards_owned") == 64 / relays for d in daemons))
    return daemons


async def bind(site: Site, pattern: str) -> None:
    """The operator mends the route."""
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", passive=True)
        await queue.bind("events", pattern)


async def state(site: Site, id_: str) -> str:
    return str(
        await site.database.fetchval(
            "SELECT CASE WHEN sent_at IS NOT NULL THEN 'sent' ELSE coalesce(aside, 'pending') END"
            " FROM outbox WHERE id = $1", id_,
        )
    )  # fmt: skip


async def until_state(site: Site, id_: str, wanted: str) -> None:
    async def is_so() -> bool:
        return await state(site, id_) == wanted

    await eventually(is_so, 20)


async def arrivals(site: Site, count: int) -> list[str]:
    return [message.message_id or "" for message in await drain(site.amqp_url, count)]


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("relays", [1, 2])
async def test_case_29_hold_waits_for_the_redrive(site: Site, relays: int) -> None:
    """A has no route, B and C have one: under `hold` they wait while A is deferred and parked, and follow it."""
    await start(site, relays)
    await site.insert("A", "nope.x", "K")
    await site.insert("B", "ok.x", "K")
    await site.insert("C", "ok.x", "K")
    await site.insert("bystander", "ok.x", "L")
    await until_state(site, "A", "parked")
    await until_state(site, "bystander", "sent")
    assert [await state(site, id_) for id_ in "BC"] == ["held", "held"]
    await site.insert("D", "ok.x", "K")
    await until_state(site, "D", "held")
    shown = await document(site, "parked", "show", "A")
    assert (shown["failure_class"], shown["attempts"], shown["failure_routing_key"]) == ("unroutable", 2, "nope.x")
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--id", "A"))["done"] == 1
    await site.all_sent()
    assert await arrivals(site, 5) == ["bystander", "A", "B", "C", "D"]


@pytest.mark.parametrize("relays", [1, 2])
async def test_case_29_continue_goes_on_without_it(site: Site, relays: int) -> None:
    """Under `continue` B and C wait only while A is deferred; A arrives after its redrive."""
    await start(site, relays, on_parked="continue")
    await site.insert("A", "nope.x", "K")
    await site.insert("B", "ok.x", "K")
    await site.insert("C", "ok.x", "K")
    await until_state(site, "A", "parked")
    await until_state(site, "C", "sent")
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--all"))["done"] == 1
    await site.all_sent()
    assert await arrivals(site, 3) == ["B", "C", "A"]


@pytest.mark.parametrize("relays", [1, 2])
async def test_two_parked_rows_of_a_key_redriven_out_of_order(site: Site, relays: int) -> None:
    """Under `hold` two rows of a key are parked where the policy was `continue` before; the second is redriven first."""
    (first, *_) = await start(site, 1, on_parked="continue")
    for id_, event_type in (("A", "nope.x"), ("B", "nope.x"), ("C", "nope.y")):
        await site.insert(id_, event_type, "K")
    await until_state(site, "C", "parked")
    assert await first.stop() == 0
    await start(site, relays)
    await bind(site, "nope.x")
    await site.until("(SELECT bool_and(holds) FROM outbox)")
    assert (await document(site, "parked", "redrive", "--id", "B"))["done"] == 1
    await until_state(site, "B", "held")
    assert (await document(site, "parked", "redrive", "--id", "A"))["done"] == 1
    await until_state(site, "B", "sent")
    assert await arrivals(site, 2) == ["A", "B"]
    await site.insert("D", "ok.x", "K")
    await until_state(site, "D", "held")
    done = await relay(site, "parked", "discard", "--id", "C", "--yes")
    assert done.returncode == 0, done.stderr
    await until_state(site, "D", "sent")
    assert await site.database.fetchval("SELECT count(*) FROM outbox WHERE id = 'C'") == 0


@pytest.mark.parametrize("relays", [1, 2])
async def test_many_keys_through_parking_and_redrive(site: Site, relays: int) -> None:
    """Every key has a head without a route and nine followers; all are redriven while rows keep coming."""
    await start(site, relays)
    await site.database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_id, payload)"
        " SELECT k || '-' || n, CASE WHEN n = 0 THEN 'nope.x' ELSE 'ok.x' END, k, '{}'"
        " FROM generate_series(0, 9) n, generate_series(1, 20) k ORDER BY n, k"
    )
    await site.until("(SELECT count(*) FROM outbox WHERE aside = 'parked') = 20")
    await bind(site, "nope.x")
    redriving = asyncio.create_task(document(site, "parked", "redrive", "--type", "nope.x", "--rate", "40/s"))
    await site.database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_id, payload)"
        " SELECT k || '-10', 'ok.x', k, '{}' FROM generate_series(1, 20) k"
    )
    assert (await redriving)["done"] == 20
    await site.all_sent(30)
    found = await arrivals(site, 220)
    assert len(found) == 220
    for key in range(1, 21):
        assert [id_ for id_ in found if id_.startswith(f"{key}-")] == [f"{key}-{n}" for n in range(11)]


@pytest.mark.parametrize("relays", [1, 2])
async def test_a_large_redrive_costs_no_lease(site: Site, relays: int) -> None:
    """L2: an operator locks the shards that the relays renew, again and again, and must leave them room."""
    await site.insert_many(5000, 50)
    await site.database.execute(
        "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now(), failure_class = 'unroutable'"
    )
    daemons = [await site.start(name=f"r{n}", lease="1s").ready() for n in range(relays)]
    await eventually(lambda: all(d.metric("relay_shards_owned") == 64 / relays for d in daemons))
    # Without settlements that take turns with it.
    assert (await relay(site, "pause")).returncode == 0
    for daemon in daemons:
        await daemon.not_ready("paused")
    epochs = await site.database.fetch("SELECT shard, epoch, owner FROM outbox_shard ORDER BY shard")
    assert (await document(site, "parked", "redrive", "--all"))["done"] == 5000
    assert await site.database.fetch("SELECT shard, epoch, owner FROM outbox_shard ORDER BY shard") == epochs
    assert [daemon.metric("relay_lease_lost_total") for daemon in daemons] == [0] * relays


@pytest.mark.parametrize("relays", [1, 2])
async def test_case_43_old_parked_rows_are_counted_not_purged_and_delivered_once(site: Site, relays: int) -> None:
    daemons = await start(site, relays, retention="1s", on_parked="continue")
    for id_ in ("p1", "p2", "p3"):
        await site.insert(id_, "nope.x", "K")
    await site.database.execute("UPDATE outbox SET created_at = '1970-01-01', occurred_at = '1970-01-01'")
    await site.insert("plain")
    for id_ in ("p1", "p2", "p3"):
        await until_state(site, id_, "parked")
    # The retention has run when the marked row is gone.
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id = 'plain')", 40)
    await eventually(lambda: all(daemon.metric("relay_parked_rows") == 3 for daemon in daemons), 30)
    assert (await document(site, "parked", "list"))["matched"] == 3
    assert (await document(site, "status"))["parked_rows"] == 3
    await bind(site, "nope.x")
    assert (await document(site, "parked", "redrive", "--id", "p2"))["done"] == 1
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id = 'p2')", 40)
    assert [await state(site, id_) for id_ in ("p1", "p3")] == ["parked", "parked"]
    assert await arrivals(site, 2) == ["plain", "p2"]


async def test_parked_rows_are_discarded_at_their_retention(site: Site) -> None:
    """By the time since they were parked; what waits behind them goes; said and counted."""
    (daemon,) = await start(site, 1, parked_retention="2s")
    await site.insert("A", "nope.x", "K")
    await site.insert("B", "ok.x", "K")
    await until_state(site, "A", "parked")
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE id = 'A')", 40)
    await until_state(site, "B", "sent")
    assert await arrivals(site, 1) == ["B"]
    await eventually(lambda: daemon.metric("relay_rows_discarded_total") == 1)
    said = [event for event in daemon.events() if event["event"] == "parked_discarded"]
    assert [(event["rows"], event["reason"]) for event in said] == [(1, "retention")]


@pytest.mark.parametrize("relays", [1, 2])
async def test_an_unmarkable_row_is_published_again(site: Site, relays: int) -> None:
    """H7: the floors have long passed it when its fault is deleted."""
    ids = await site.insert_many(30, 6)
    await site.database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class, failure_error)"
        " SELECT seq, id, 'unmarkable', 'no' FROM outbox WHERE id = 'm7'"
    )
    await start(site, relays)
    await site.until("(SELECT count(*) FROM outbox WHERE sent_at IS NULL) = 1")
    await site.until("(SELECT min(floor) >= 30 FROM outbox_shard)")
    done = await document(site, "parked", "redrive", "--error", "unmarkable")
    assert (done["done"], done["republished"]) == (1, ["m7"])
    await site.all_sent()
    found = await arrivals(site, 30)
    assert sorted(found) == sorted(ids)
    assert found[-1] == "m7"


# ---------------------------------------------------------------- pause


@pytest.mark.parametrize("relays", [1, 2])
async def test_pause_stops_all_relays_and_survives_a_restart(site: Site, relays: int) -> None:
    daemons = await start(site, relays)
    done = await relay(site, "pause")
    assert (done.returncode, done.stderr) == (0, "")
    assert "paused, by postgres at" in done.stdout
    for daemon in daemons:
        await daemon.not_ready("paused")
        assert daemon.metric("relay_paused") == 1
    await site.insert_many(20, 4)
    assert await daemons[0].stop() == 0
    again = site.start(name="again", **FEW_TRIES)
    await again.not_ready("paused")
    status = await document(site, "status")
    assert (status["is_paused"], status["paused_by"], status["backlog_rows"]) == (True, "postgres", 20)
    assert await site.unsent() == 20
    assert "was paused already" in (await relay(site, "pause")).stdout
    assert "resumed; postgres had paused it" in (await relay(site, "resume")).stdout
    await site.all_sent()
    assert "was not paused" in (await relay(site, "resume")).stdout
    assert len(await arrivals(site, 20)) == 20


# ---------------------------------------------------------------- what the commands say


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
    assert done.stdout == "2 rows of 2 redriven\n"
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


async def test_expired_rows_alone_exit_4_and_say_how(site: Site) -> None:
    await park(site, "m1")
    await site.database.execute("UPDATE outbox SET expires_at = '1970-01-01'")
    done = await relay(site, "parked", "redrive", "--all")
    assert done.returncode == 4
    assert "--ignore-expiry" in done.stdout
    done = await relay(site, "parked", "redrive", "--all", "--ignore-expiry")
    assert done.returncode == 0
    await bind(site, "nope.x")
    site.start()
    await site.all_sent()


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 2), ("", 1, 2), ("y", 0, 0)])
async def test_discard_asks_on_a_terminal(site: Site, answer: str, code: int, left: int) -> None:
    await park(site, "m1", "m2")
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "parked", "discard", "--all",
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(site.settings),
    )  # fmt: skip
    os.close(theirs)
    assert process.stderr is not None
    asked = await asyncio.wait_for(process.stderr.readuntil(b"[y/N] "), 20)
    assert b"delete 2 rows of public.outbox for good?" in asked
    os.write(ours, f"{answer}\n".encode())
    await asyncio.wait_for(process.wait(), 20)
    os.close(ours)
    assert process.returncode == code
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
