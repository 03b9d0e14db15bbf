"""`relay demo`, `relay bench`: on throwaway servers, and on one's own."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from relay.cli.console import Commands, Console, Screen, add_command, print_columns, print_json, wait_for

if TYPE_CHECKING:
    from relay.demo import Verdict


def add(commands: Commands) -> None:
    text = "the whole path on throwaway servers, with a relay that is killed midway"
    add_command(commands, "demo", _demo, text, exit_4="a guarantee did not hold")
    bench = add_command(
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


def _demo(options: argparse.Namespace, console: Console) -> int:
    console.config("demo")
    console.warn()
    from relay import demo

    screen = Screen(is_live=sys.stderr.isatty())
    verdict = wait_for(demo.run(screen.step, screen.gauge))
    screen.clear()
    _print_verdict(verdict)
    return 0 if verdict.holds else 4


def _print_verdict(verdict: Verdict) -> None:
    width = max(len(line.name) for line in verdict.lines)
    for line in verdict.lines:
        mark = {True: "ok", False: "FAILED", None: ""}[line.holds]
        print(f"{line.name:<{width}}  {line.value:>12}  {mark}".rstrip())
    print()
    print(verdict.summary)


def _bench(options: argparse.Namespace, console: Console) -> int:
    from relay.benchmark.plan import read_plan

    plan = read_plan(options)
    config = console.config("bench")
    console.warn()
    from relay import benchmark
    from relay.benchmark import figures

    screen = Screen(is_live=sys.stderr.isatty())
    outcome = wait_for(benchmark.run(config, console.environ, plan, screen.step, screen.gauge))
    screen.clear()
    if options.json:
        print_json(figures.document(outcome), console)
    else:
        print_columns(figures.lines(outcome), console)
    return 0
