"""The command line: arguments, printing, exit codes. The only module that prints and that reads the
environment.

Exit codes: 0 done; 1 anything else; 2 configuration or usage; 3 the schema is incompatible; 4 the command's
own "no" (a check found an error, a drain was cut short, a guarantee of the demo did not hold). Whatever goes
wrong outside is one line on standard error and, where there is one, a second that says what to do; a
traceback is a fault of ours.

Imports are late on purpose: `relay run` stands beside every service, so it loads what it uses and nothing
else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from relay import __version__
from relay.errors import CheckFailed, ConfigError, NothingMatched, RelayError, UsageError

if TYPE_CHECKING:
    import asyncio

    from relay.admin import Status
    from relay.config import Config
    from relay.demo import Verdict
    from relay.parked_rows import Action, Filter, Outcome
    from relay.preflight import Finding
    from relay.topology.changes import Change

WATCH_INTERVAL_S: Final = 2.0

LIST_ROWS: Final = 100
"""What `parked list` and a dry run show without --limit."""

EPILOG: Final = """\
Settings come from the environment: RELAY_DATABASE_URL, RELAY_AMQP_URL ... (docs/configuration.md has all).
Exit codes: 0 done, 1 failed, 2 configuration or usage, 3 schema incompatible, 4 the command's own "no".
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    console = _Console(os.environ)
    options = _parser().parse_args(argv)
    try:
        code = int(options.perform(options, console))
        sys.stdout.flush()
    except RelayError as error:
        console.complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.note("interrupted")
        return 1
    except BrokenPipeError:
        # Whoever read the output has seen enough; the interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost place: reported as a fault of ours
        console.confess(error)
        return 1
    return code


class _Console:
    """Where a command's words go, and its environment. Secrets are redacted once they are known."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.redact: Callable[[str], str] = str
        self.warnings: tuple[str, ...] = ()

    def config(self, command: str, *, spared: Iterable[str] = ()) -> Config:
        """The configuration as `command` uses it; `spared` settings need not be set. Raises ConfigError."""
        from relay.config import load, needed_by, used_by

        needs = needed_by(command) - frozenset(spared)
        config, self.warnings = load(self.environ, needs=needs, uses=used_by(command))
        self.redact = config.redactor.redact
        return config

    def warn(self) -> None:
        """The configuration's warnings, as lines."""
        for warning in self.warnings:
            self.note(f"warning: {warning}")

    def note(self, text: str) -> None:
        print(f"relay: {self.redact(text)}", file=sys.stderr)

    def complain(self, error: RelayError) -> None:
        """An error for a person: its text, for a configuration each problem on a line, and the hint."""
        if isinstance(error, ConfigError):
            many = f"{len(error.problems)} problems" if len(error.problems) > 1 else "a problem"
            self.note(f"the configuration has {many}")
            for problem in error.problems:
                print(f"  {self.redact(problem)}", file=sys.stderr)
        else:
            self.note(error.message)
        if error.hint:
            print(f"  {self.redact(error.hint)}", file=sys.stderr)

    def confess(self, error: Exception) -> None:
        """A fault of ours: with its traceback, redacted, for the bug report."""
        import traceback

        from relay.redaction import mask_urls

        text = "".join(traceback.format_exception(error))
        print(mask_urls(self.redact(text)), end="", file=sys.stderr)
        self.note("this is a fault of relay itself; please report the lines above")


# ---------------------------------------------------------------- run


def _run(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("run")
    from relay import daemon, tracing

    is_traced, warnings = tracing.is_wanted(console.environ)
    return daemon.run(config, (*console.warnings, *warnings), is_traced=is_traced)


# ---------------------------------------------------------------- migrate


def _migrate(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("migrate", spared=("RELAY_DATABASE_URL",) if options.print else ())
    from relay import migrate

    wanted = {name: getattr(options, name) for name in ("payload", "doorbell", "role", "writer")}
    if options.print:
        sys.stdout.write(migrate.printed(config.table, **wanted))
        return 0
    console.warn()
    done = _await(migrate.run(config.database(), config.table, **wanted))
    schema = done.schema
    did = "created" if done.version_before == 0 else "upgraded"
    if done.version_before == schema.version:
        did = "up to date"
    doorbell = "with the doorbell" if schema.has_doorbell else "without the doorbell: relays poll"
    print(f"{schema.table}: {did}, schema version {schema.version}, payload {schema.payload_type}, {doorbell}")
    for name, text in (("role", "may run the relay"), ("writer", "may write events")):
        if wanted[name] is not None:
            print(f"{schema.table}: the role {wanted[name]} {text}")
    return 0


def _inbox_migrate(options: argparse.Namespace, console: _Console) -> int:
    spared = ("RELAY_INBOX_DATABASE_URL",) if options.print else ()
    config = console.config("inbox migrate", spared=spared)
    from relay.inbox import migrate

    if options.print:
        sys.stdout.write(migrate.printed(table=config.inbox_table, role=options.role))
        return 0
    console.warn()
    _await(migrate.run(config.inbox_database(), table=config.inbox_table, role=options.role))
    print(f"processed_messages, {config.inbox_table}: in place")
    return 0


def _inbox_run(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("inbox run")
    from relay.inbox import sidecar

    return sidecar.run(config, console.warnings)


# ---------------------------------------------------------------- check


def _check(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("check")
    from relay import preflight

    screen = _Screen(is_live=sys.stderr.isatty())
    findings = _await(preflight.check(config, console.warnings, on_deep=screen.gauge if options.deep else None))
    screen.clear()
    if options.json:
        _print_json(preflight.as_document(findings), console)
    else:
        _print_findings(findings, console)
    return 4 if any(finding.level is preflight.Level.ERROR for finding in findings) else 0


def _print_findings(findings: Sequence[Finding], console: _Console) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mend = f"; {finding.mend}" if finding.mend else ""
        print(console.redact(f"{finding.level:<11}  {finding.check:<{width}}  {finding.text}{mend}"))


# ---------------------------------------------------------------- status


def _status(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("status")
    console.warn()
    from relay import admin

    if options.metrics_url is not None and not options.watch:
        raise UsageError("--metrics-url is for --watch")
    if options.metrics_url is not None and not options.metrics_url.startswith(("http://", "https://")):
        raise UsageError(f"--metrics-url {options.metrics_url}: http://HOST:PORT/metrics, or https://…")
    if not options.watch:
        _print_status(_await(admin.status(config)), console, as_json=options.json)
        return 0
    is_live = sys.stdout.isatty() and not options.json
    with contextlib.suppress(KeyboardInterrupt):  # the way in which a watch ends
        if is_live:
            _await(_watch_live(config, console, options.metrics_url))
        else:
            _await(_watch(config, console, as_json=options.json))
    return 0


async def _watch_live(config: Config, console: _Console, url: str | None) -> None:
    import asyncio

    from rich.live import Live

    from relay import live, scrape, watch

    view = live.View(url or scrape.metrics_url(config.listen))
    with Live(live.draw(view), auto_refresh=False) as screen:
        while True:
            await watch.look(config, view, console.redact)
            screen.update(live.draw(view), refresh=True)
            await asyncio.sleep(WATCH_INTERVAL_S)


async def _watch(config: Config, console: _Console, *, as_json: bool) -> None:
    import asyncio

    from relay import admin

    before: Status | None = None
    while True:
        now = await admin.status(config, since=before)
        if before is not None and not as_json:
            print()
        _print_status(now, console, as_json=as_json)
        sys.stdout.flush()
        before = now
        await asyncio.sleep(WATCH_INTERVAL_S)


def _print_status(status: Status, console: _Console, *, as_json: bool) -> None:
    from relay import admin

    if as_json:
        _print_json(admin.as_document(status), console)
        return
    lines = admin.as_lines(status)
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(console.redact(f"{name:<{width}}  {text}".rstrip()))


# ---------------------------------------------------------------- pause and resume


def _pause(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("pause")
    console.warn()
    from relay import pause

    found = _await(pause.pause(config))
    said = "paused" if found.is_news else "was paused already"
    print(f"{found.table}: {said}, by {found.by} at {found.since.isoformat()}; its relays stop within about a second")
    return 0


def _resume(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("resume")
    console.warn()
    from relay import pause

    found = _await(pause.resume(config))
    if found.is_news:
        print(f"{found.table}: resumed; {found.by} had paused it at {found.since.isoformat()}")
    else:
        print(f"{found.table}: was not paused")
    return 0


# ---------------------------------------------------------------- parked


def _parked_list(options: argparse.Namespace, console: _Console) -> int:
    from relay import parked, parked_text

    chosen = _filter(options)
    limit = parked_text.read_limit(options.limit) or LIST_ROWS
    config = console.config("parked")
    console.warn()
    found = _await(parked.listing(config, chosen, limit))
    if options.json:
        _print_json(parked_text.listing_document(found), console)
    else:
        _print_lines(parked_text.listing_lines(found), console)
    return 0 if found.matched else _nothing(found.table, console)


def _parked_show(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("parked")
    console.warn()
    from relay import parked, parked_text

    record = _await(parked.details(config, options.id, with_payload=options.payload))
    document = parked_text.details_document(record, with_payload=options.payload)
    if options.json:
        _print_json(document, console)
    else:
        _print_lines(parked_text.details_lines(document), console)
    return 0


def _parked_redrive(options: argparse.Namespace, console: _Console) -> int:
    from relay.parked_rows import Action

    return _act(Action.REDRIVE, options, console)


def _parked_discard(options: argparse.Namespace, console: _Console) -> int:
    from relay.parked_rows import Action

    return _act(Action.DISCARD, options, console)


def _act(action: Action, options: argparse.Namespace, console: _Console) -> int:
    """Redrive or discard: the same but that what is deleted is asked for first."""
    from relay import logs, parked, parked_text
    from relay.parked_rows import Action

    chosen = _filter(options)
    if options.all and not chosen.is_empty():
        raise UsageError("--all with a filter: which of the two is meant?")
    if chosen.is_empty() and not options.all:
        raise UsageError(f"parked {action} without a filter: name one, or --all for every parked row")
    limit, rate = parked_text.read_limit(options.limit), parked_text.read_rate(options.rate)
    asks = action is Action.DISCARD and not (options.yes or options.dry_run)
    if asks and not sys.stdin.isatty():
        raise UsageError("parked discard deletes rows: --yes says that this is meant")
    config = console.config("parked")
    console.warn()
    until = None
    if asks or options.dry_run:
        shown = min(limit or LIST_ROWS, LIST_ROWS) if options.dry_run else 0
        found = _await(parked.listing(config, chosen, shown))
        skipped = found.expired if action is Action.REDRIVE and not options.ignore_expiry else 0
        count = found.matched - skipped if limit is None else min(found.matched - skipped, limit)
        if options.dry_run:
            if options.json:
                _print_json(parked_text.dry_document(action, found, count), console)
            else:
                _print_lines(parked_text.listing_lines(found), console)
                if found.matched:
                    print(f"{parked_text.rows(count)} would be {parked_text.done(action)}; nothing was changed")
            return 0 if found.matched else _nothing(found.table, console)
        if not found.matched:
            return _nothing(found.table, console)
        if not _confirmed(f"delete {parked_text.rows(count)} of {found.table} for good?"):
            console.note("nothing was discarded")
            return 1
        until = found.observed_at
    logs.setup(config.log_format, config.log_level, config.redactor)
    screen = _Screen(is_live=sys.stderr.isatty())

    def on_progress(outcome: Outcome) -> None:
        screen.gauge(f"{outcome.done:,} rows {parked_text.done(action)}")

    def on_end(outcome: Outcome) -> None:
        screen.clear()
        logs.get_logger().info(
            f"parked_{parked_text.done(action)}",
            table=outcome.table,
            role=outcome.role,
            filter=chosen.as_document() or "all",
            rows=outcome.done,
            matched=outcome.matched,
            refused=len(outcome.refused),
            ignore_expiry=outcome.ignore_expiry,
        )

    outcome = _await(
        parked.act(
            config,
            action,
            chosen,
            until=until,
            limit=limit,
            rate_per_s=rate,
            ignore_expiry=options.ignore_expiry,
            on_progress=on_progress,
            on_end=on_end,
        )
    )
    if options.json:
        _print_json(parked_text.outcome_document(outcome), console)
    elif outcome.matched:
        _print_lines(parked_text.outcome_lines(outcome), console)
    if outcome.refused or outcome.locked:
        return 1
    if outcome.matched == 0:
        return _nothing(outcome.table, console)
    return 0 if outcome.done else NothingMatched.exit_code


def _filter(options: argparse.Namespace) -> Filter:
    from relay import parked_text

    return parked_text.read_filter(options.type, options.key, options.error, options.id, options.since)


def _nothing(table: str, console: _Console) -> int:
    console.note(f"no parked row of {table} matches")
    return NothingMatched.exit_code


def _confirmed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_lines(lines: Iterable[str], console: _Console) -> None:
    for line in lines:
        print(console.redact(line))


# ---------------------------------------------------------------- topology


def _topology_plan(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    plan = apply.plan(config, apply.wanted_by(options.file, options.vhost))
    if options.json:
        _print_json(words.document(plan), console)
    else:
        _print_lines(words.lines(plan), console)
    return 0


def _topology_apply(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    wanted = apply.wanted_by(options.file, options.vhost)
    done: list[Change] = []
    plan = apply.apply(config, wanted, done.append)
    if options.json:
        document = words.document(plan)
        _print_json({**document, "done": [words.change_document(change) for change in done]}, console)
    else:
        _print_lines([*words.change_lines([*done, *(plan.changes or ())]), words.summary(plan)], console)
    return CheckFailed.exit_code if plan.differs else 0


def _topology_check(options: argparse.Namespace, console: _Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    plan = apply.check(config, apply.wanted_by(options.file, options.vhost))
    if options.json:
        _print_json(words.document(plan), console)
    else:
        _print_lines([*words.change_lines(plan.changes or ()), words.summary(plan)], console)
    return CheckFailed.exit_code if plan.differs else 0


# ---------------------------------------------------------------- redrive


def _redrive(options: argparse.Namespace, console: _Console) -> int:
    from relay import logs, parked_text
    from relay.redrive import run, words

    order = words.read_order(
        options.queue,
        options.where,
        options.to_exchange,
        options.routing_key,
        limit=parked_text.read_limit(options.limit),
        rate_per_s=parked_text.read_rate(options.rate),
        is_dry=options.dry_run,
    )
    config = console.config("redrive")
    console.warn()
    logs.setup(config.log_format, config.log_level, config.redactor)
    screen = _Screen(is_live=sys.stderr.isatty())

    def on_progress(outcome: run.Outcome) -> None:
        screen.gauge(f"{outcome.looked_at:,} looked at, {outcome.redriven:,} redriven")

    def on_end(outcome: run.Outcome) -> None:
        screen.clear()
        if outcome.matched and not outcome.is_dry:
            counts = {"matched": outcome.matched, "redriven": outcome.redriven, "failed": sum(outcome.failed.values())}
            logs.get_logger().info(
                "queue_redriven", queue=outcome.queue, run=outcome.run, where=options.where, **counts
            )

    async def until_stopped() -> run.Outcome:
        return await run.redrive(config, order, _stop_signals(), on_progress, on_end)

    outcome = _await(until_stopped())
    if options.json:
        _print_json(words.document(outcome), console)
    else:
        _print_lines(words.lines(outcome), console)
    if outcome.failed or outcome.stopped is not None:
        return 1
    return 0 if outcome.matched else NothingMatched.exit_code


def _stop_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; a second one ends the process."""
    import asyncio
    import signal

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def stop_once() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_once)
    return stop


# ---------------------------------------------------------------- demo


def _demo(options: argparse.Namespace, console: _Console) -> int:
    console.config("demo")
    from relay import demo

    screen = _Screen(is_live=sys.stderr.isatty())
    verdict = _await(demo.run(screen.step, screen.gauge))
    screen.clear()
    _print_verdict(verdict)
    return 0 if verdict.holds else 4


class _Screen:
    """Progress on a terminal: steps as lines, and one last line that is rewritten. Nothing in a pipe."""

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._shown = ""
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        if self._is_live:
            self.clear()
            print(f"{time.monotonic() - self._began:5.1f} s  {text}", file=sys.stderr)

    def gauge(self, text: str) -> None:
        if self._is_live:
            print(f"\r{text:<{len(self._shown)}}", end="", file=sys.stderr, flush=True)
            self._shown = text

    def clear(self) -> None:
        if self._shown:
            print(f"\r{'':<{len(self._shown)}}\r", end="", file=sys.stderr, flush=True)
            self._shown = ""


def _print_verdict(verdict: Verdict) -> None:
    width = max(len(line.name) for line in verdict.lines)
    for line in verdict.lines:
        mark = {True: "ok", False: "FAILED", None: ""}[line.holds]
        print(f"{line.name:<{width}}  {line.value:>12}  {mark}".rstrip())
    print()
    print(verdict.summary)


# ---------------------------------------------------------------- bench


def _bench(options: argparse.Namespace, console: _Console) -> int:
    from relay.benchmark.plan import read_plan

    plan = read_plan(options)
    config = console.config("bench")
    console.warn()
    from relay import benchmark
    from relay.benchmark import figures

    screen = _Screen(is_live=sys.stderr.isatty())
    outcome = _await(benchmark.run(config, console.environ, plan, screen.step, screen.gauge))
    screen.clear()
    if options.json:
        _print_json(figures.document(outcome), console)
    else:
        shown = figures.lines(outcome)
        width = max(len(name) for name, _ in shown)
        _print_lines((f"{name:<{width}}  {text}" for name, text in shown), console)
    return 0


# ---------------------------------------------------------------- the parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="relay",
        description="Publishes the rows of a PostgreSQL outbox to RabbitMQ: at least once, in order per key.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"relay {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _add(commands, "run", _run, "the daemon: publish what is in the outbox, until SIGTERM or SIGINT")

    migrate = _add(commands, "migrate", _migrate, "create or upgrade the outbox's schema; safe to repeat")
    migrate.add_argument("--print", action="store_true", help="write the SQL for psql, touch nothing")
    migrate.add_argument("--role", metavar="NAME", help="grant an existing role the least rights that `run` needs")
    migrate.add_argument(
        "--writer", metavar="NAME", help="grant an existing role INSERT on the writers' columns, nothing else"
    )
    migrate.add_argument(
        "--payload",
        choices=("json", "jsonb", "text", "bytea"),
        help="the payload column's type (default: json)",
    )
    migrate.add_argument(
        "--doorbell",
        action=argparse.BooleanOptionalAction,
        help="with or without the trigger that wakes an idle relay "
        "(default: with, unless max_prepared_transactions is above 0)",
    )

    check = _add(commands, "check", _check, "preflight: one line per finding, with the mend; exit 4 on an error")
    check.add_argument("--json", action="store_true", help="one JSON document")
    check.add_argument(
        "--deep", action="store_true", help="also walk through the table for unsent rows that nobody reads any more"
    )

    status = _add(commands, "status", _status, "backlog, ages, what is deferred, held and parked, who relays")
    status.add_argument("--json", action="store_true", help="one JSON document")
    status.add_argument(
        "--watch",
        action="store_true",
        help="again every two seconds, until interrupted: on a terminal a live view, else one text after the other",
    )
    status.add_argument(
        "--metrics-url",
        metavar="URL",
        help="with --watch: the relay that is asked for what is in flight and what it waits for (default: at RELAY_LISTEN)",
    )

    _add(commands, "pause", _pause, "all relays of this outbox stop reading and publishing; survives restarts")
    _add(commands, "resume", _resume, "they go on")
    _add_parked(commands)

    _add_topology(commands)
    _add_redrive(commands)

    _add_bench(commands)
    _add(commands, "demo", _demo, "the whole path on throwaway servers, with a relay that is killed midway")

    inbox = _add(commands, "inbox", None, "the consumer's half")
    inbox_commands = inbox.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inbox_migrate = _add(
        inbox_commands, "migrate", _inbox_migrate, "create the consumer's tables in the consumer's database"
    )
    inbox_migrate.add_argument("--print", action="store_true", help="write the SQL for psql, touch nothing")
    inbox_migrate.add_argument("--role", metavar="NAME", help="grant an existing role what a consumer needs")
    _add(
        inbox_commands,
        "run",
        _inbox_run,
        "the consumer's sidecar: a queue into the inbox table, until SIGTERM or SIGINT",
    )
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _add(
        commands, "bench", _bench, "drain and trickle against the configured servers, on a table and a queue of its own"
    )
    for name, metavar, text in (
        ("--rows", "N", "rows of the backlog that is drained (default: 20000)"),
        ("--keys", "N", "ordering keys (default: 5000)"),
        ("--payload-bytes", "N", "size of a payload (default: 250)"),
        ("--rate", "N", "rows a second of the trickle (default: 200)"),
        ("--seconds", "N", "how long it trickles (default: 10)"),
    ):
        bench.add_argument(name, metavar=metavar, help=text)
    bench.add_argument(
        "--queue", choices=("quorum", "classic"), default="quorum", help="the queue's type (default: quorum)"
    )
    bench.add_argument("--json", action="store_true", help="one JSON document")


def _add_parked(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parked = _add(commands, "parked", None, "the rows that need an operator")
    actions = parked.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listed = _add(actions, "list", _parked_list, "the parked rows that match, the lowest seq first")
    _add_filter(listed)
    listed.add_argument("--limit", metavar="N", help=f"show at most so many (default: {LIST_ROWS})")

    shown = _add(actions, "show", _parked_show, "everything that is kept of one parked row, without its payload")
    shown.add_argument("id", metavar="ID", help="the message id")
    shown.add_argument("--payload", action="store_true", help="with headers and payload")
    shown.add_argument("--json", action="store_true", help="one JSON document")

    redrive = _add(actions, "redrive", _parked_redrive, "parked rows are due again, under their ids, in their order")
    discard = _add(actions, "discard", _parked_discard, "delete parked rows for good")
    for acting in (redrive, discard):
        _add_filter(acting)
        acting.add_argument("--all", action="store_true", help="every parked row; instead of a filter")
        acting.add_argument("--limit", metavar="N", help="at most so many rows, the lowest seq first")
        acting.add_argument(
            "--rate", metavar="N/s", help="at most so many rows a second (50/s), minute (600/m) or hour"
        )
        acting.add_argument("--dry-run", action="store_true", help="show what would be done, change nothing")
        acting.add_argument("--yes", action="store_true", help="do not ask; scripts need it for `discard`")
        acting.set_defaults(ignore_expiry=False)
    redrive.add_argument(
        "--ignore-expiry",
        action="store_true",
        help="also rows whose deadline has passed: their expires_at is cleared",
    )


def _add_topology(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    topology = _add(commands, "topology", None, "the broker's exchanges, queues and policies, by a TOML file")
    actions = topology.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, perform, text in (
        ("plan", _topology_plan, "what `apply` would do, and the rabbitmqctl lines that do the same"),
        ("apply", _topology_apply, "declare what is missing, set policies; deletes nothing; exit 4 on a conflict"),
        ("check", _topology_check, "compare, change nothing; exit 4 where the broker differs"),
    ):
        acting = _add(actions, name, perform, text)
        acting.add_argument("file", metavar="FILE", help="the topology, in TOML (docs/topology.md)")
        acting.add_argument("--vhost", metavar="NAME", help="instead of the file's vhost")
        acting.add_argument("--json", action="store_true", help="one JSON document")


def _add_redrive(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    redrive = _add(commands, "redrive", _redrive, "messages of a broker's queue back to work, under their ids")
    redrive.add_argument("queue", metavar="QUEUE", help="such as orders.inventory.parking")
    redrive.add_argument("--to-exchange", metavar="NAME", help="instead of the exchange that the message first came by")
    redrive.add_argument("--routing-key", metavar="KEY", help="instead of the routing key that it first had")
    redrive.add_argument(
        "--where",
        metavar="HEADER=VALUE",
        action="append",
        default=[],
        help="only messages with this header (or property: type, app_id ...); may be repeated",
    )
    redrive.add_argument("--limit", metavar="N", help="at most so many messages, the oldest first")
    redrive.add_argument("--rate", metavar="N/s", help="at most so many a second (50/s), minute (600/m) or hour")
    redrive.add_argument("--dry-run", action="store_true", help="show what would be sent, send nothing")
    redrive.add_argument("--yes", action="store_true", help="asks nothing anyway; for scripts that say it everywhere")
    redrive.add_argument("--json", action="store_true", help="one JSON document")


def _add_filter(parser: argparse.ArgumentParser) -> None:
    for name, metavar, text in (
        ("--type", "TYPE", "of this event type"),
        ("--key", "KEY", "of this ordering key: aggregate_id, or type/id"),
        ("--error", "TEXT", "of this failure class, or with this text in the error"),
        ("--id", "ID", "with this message id"),
    ):
        parser.add_argument(name, metavar=metavar, action="append", default=[], help=f"{text}; may be repeated")
    parser.add_argument("--since", metavar="TIME", help="parked since: a duration before now (2h), or an ISO time")
    parser.add_argument("--json", action="store_true", help="one JSON document")


Perform = Callable[[argparse.Namespace, _Console], int]


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    perform: Perform | None,
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"relay {__version__}")
    if perform is not None:
        parser.set_defaults(perform=perform)
    return parser


def _await(work: Any) -> Any:
    import asyncio

    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        # SIGTERM, where a command turns it into a cancellation so that it cleans up.
        raise KeyboardInterrupt from None


def _print_json(document: Mapping[str, object], console: _Console) -> None:
    import json

    print(console.redact(json.dumps(document, indent=2, ensure_ascii=False)))
