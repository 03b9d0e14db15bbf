"""`relay parked list | show | redrive | discard`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from relay.cli.console import NOTHING_MATCHED, Commands, Console, Screen, add_command, print_json, print_lines, wait_for
from relay.errors import NothingMatched, UsageError

if TYPE_CHECKING:
    from relay.parked_rows import Action, Filter, Outcome

LIST_ROWS: Final = 100
"""What `parked list` and a dry run show without --limit."""


def add(commands: Commands) -> None:
    parked = add_command(commands, "parked", None, "the rows that need an operator")
    actions = parked.add_subparsers(title="commands", metavar="COMMAND", required=True)

    text = "the parked rows that match, the lowest seq first"
    listed = add_command(actions, "list", _parked_list, text, exit_4=NOTHING_MATCHED)
    _add_filter(listed)
    listed.add_argument("--limit", metavar="N", help=f"show at most so many (default: {LIST_ROWS})")

    text = "everything that is kept of one parked row, without its payload"
    shown = add_command(actions, "show", _parked_show, text, exit_4="no such row is parked")
    shown.add_argument("id", metavar="ID", help="the message id")
    shown.add_argument("--payload", action="store_true", help="with headers and payload")
    shown.add_argument("--json", action="store_true", help="one JSON document")

    text = "parked rows are due again, under their ids, in their order"
    redrive = add_command(actions, "redrive", _parked_redrive, text, exit_4=NOTHING_MATCHED)
    discard = add_command(actions, "discard", _parked_discard, "delete parked rows for good", exit_4=NOTHING_MATCHED)
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


def _parked_list(options: argparse.Namespace, console: Console) -> int:
    from relay import parked, parked_text

    chosen = _filter(options)
    limit = parked_text.read_limit(options.limit) or LIST_ROWS
    config = console.config("parked")
    console.warn()
    found = wait_for(parked.listing(config, chosen, limit))
    if options.json:
        print_json(parked_text.listing_document(found), console)
    else:
        print_lines(parked_text.listing_lines(found), console)
    return 0 if found.matched else _nothing(found.table, console)


def _parked_show(options: argparse.Namespace, console: Console) -> int:
    from relay import parked, parked_text

    id_ = parked_text.read_id(options.id)
    config = console.config("parked")
    console.warn()
    record = wait_for(parked.details(config, id_, with_payload=options.payload))
    document = parked_text.details_document(record, with_payload=options.payload)
    if options.json:
        print_json(document, console)
    else:
        print_lines(parked_text.details_lines(document), console)
    return 0


def _parked_redrive(options: argparse.Namespace, console: Console) -> int:
    from relay.parked_rows import Action

    return _act(Action.REDRIVE, options, console)


def _parked_discard(options: argparse.Namespace, console: Console) -> int:
    from relay.parked_rows import Action

    return _act(Action.DISCARD, options, console)


def _act(action: Action, options: argparse.Namespace, console: Console) -> int:
    """Redrive or discard: the same but that what is deleted is asked for first."""
    from relay import logs, parked, parked_text
    from relay.parked_rows import Action, Outcome, takes_expired

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
        with_expired = takes_expired(action, ignore_expiry=options.ignore_expiry)
        found = wait_for(parked.listing(config, chosen, shown, with_expired=with_expired))
        plan = Outcome.begin(action, found, ignore_expiry=options.ignore_expiry)
        plan.done = plan.planned(limit)
        if options.dry_run:
            if options.json:
                print_json(parked_text.dry_document(plan, found), console)
            elif plan.matched:
                print_lines(parked_text.dry_lines(plan, found), console)
            return _ended(plan, console)
        if not plan.matched:
            return _nothing(found.table, console)
        if not _confirmed(f"delete {parked_text.rows(plan.done)} of {found.table} for good?"):
            console.note("nothing was discarded")
            return 1
        until = found.observed_at
    logs.setup(config.log_format, config.log_level, config.redactor)
    screen = Screen(is_live=sys.stderr.isatty())

    def on_progress(outcome: Outcome) -> None:
        screen.gauge(f"{outcome.done:,} rows {parked_text.done(action)}")

    def on_end(outcome: Outcome) -> None:
        screen.clear()
        logs.get_logger().info(
            "parked_redriven" if action is Action.REDRIVE else "parked_discarded",
            table=outcome.table,
            role=outcome.role,
            filter=chosen.as_document() or "all",
            rows=outcome.done,
            matched=outcome.matched,
            refused=len(outcome.refused),
            ignore_expiry=outcome.ignore_expiry,
        )

    outcome = wait_for(
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
        print_json(parked_text.outcome_document(outcome), console)
    elif outcome.matched:
        print_lines(parked_text.outcome_lines(outcome), console)
    return _ended(outcome, console)


def _filter(options: argparse.Namespace) -> Filter:
    from relay import parked_text

    return parked_text.read_filter(options.type, options.key, options.error, options.id, options.since)


def _ended(outcome: Outcome, console: Console) -> int:
    """The exit code: a dry run has the real one's."""
    if outcome.refused or outcome.locked:
        return 1
    if outcome.matched == 0:
        return _nothing(outcome.table, console)
    return 0 if outcome.done else NothingMatched.exit_code


def _nothing(table: str, console: Console) -> int:
    console.note(f"no parked row of {table} matches")
    return NothingMatched.exit_code


def _confirmed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    # As bytes: what is no letter of the terminal's encoding is no yes either.
    return sys.stdin.buffer.readline().strip().lower() in (b"y", b"yes")
