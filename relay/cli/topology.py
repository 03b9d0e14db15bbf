"""`relay topology plan | apply | check`. What they print is the file's and the broker's: no setting's password is in it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from relay.cli.console import Commands, Console, add_command, print_json, print_lines
from relay.errors import CheckFailed

if TYPE_CHECKING:
    from relay.topology.changes import Change


def add(commands: Commands) -> None:
    topology = add_command(commands, "topology", None, "the broker's exchanges, queues and policies, by a TOML file")
    actions = topology.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, perform, text, exit_4 in (
        (
            "plan",
            _topology_plan,
            "what `apply` would do, and the rabbitmqctl lines that do the same; only those without RELAY_MANAGEMENT_URL",
            "the broker differs",
        ),
        (
            "apply",
            _topology_apply,
            "declare what is missing, set policies; deletes nothing; by RELAY_MANAGEMENT_URL",
            "something is in conflict, and was left",
        ),
        ("check", _topology_check, "compare, change nothing; by RELAY_MANAGEMENT_URL", "the broker differs"),
    ):
        acting = add_command(actions, name, perform, text, exit_4=exit_4)
        acting.add_argument("file", metavar="FILE", help="the topology, in TOML (docs/topology.md)")
        acting.add_argument("--vhost", metavar="NAME", help="instead of the file's vhost")
        acting.add_argument("--json", action="store_true", help="one JSON document")


def _topology_plan(options: argparse.Namespace, console: Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    plan = apply.plan(config, apply.wanted_by(options.file, options.vhost))
    if options.json:
        print_json(words.document(plan), console.unlearned())
    else:
        print_lines(words.lines(plan), console.unlearned())
    return CheckFailed.exit_code if plan.differs else 0


def _topology_apply(options: argparse.Namespace, console: Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    wanted = apply.wanted_by(options.file, options.vhost)
    done: list[Change] = []
    plan, told = apply.apply(config, wanted, done.append), console.unlearned()
    if options.json:
        document = words.document(plan)
        print_json({**document, "done": [words.change_document(change) for change in done]}, told)
    else:
        print_lines([*words.change_lines([*done, *(plan.changes or ())]), words.summary(plan)], told)
    return CheckFailed.exit_code if plan.differs else 0


def _topology_check(options: argparse.Namespace, console: Console) -> int:
    config = console.config("topology")
    console.warn()
    from relay.topology import apply, words

    plan = apply.check(config, apply.wanted_by(options.file, options.vhost))
    if options.json:
        print_json(words.document(plan), console.unlearned())
    else:
        print_lines([*words.change_lines(plan.changes or ()), words.summary(plan)], console.unlearned())
    return CheckFailed.exit_code if plan.differs else 0
