"""A plan in words: lines for people, a document with stable keys for scripts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from relay.topology.apply import Plan
from relay.topology.changes import Action, Change

_MARKS: Final = {Action.CREATE: "+", Action.UPDATE: "~", Action.CONFLICT: "!", Action.LEFTOVER: "?"}


def lines(plan: Plan) -> list[str]:
    """The differences, and the commands that make them by hand."""
    if plan.changes is None:
        return list(plan.commands)
    shown = change_lines(plan.changes)
    if plan.commands:
        shown += ["", "# the same by hand:", *plan.commands]
    return [*shown, *([""] if shown else []), summary(plan)]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """One line each: what, of which kind, its name, the detail; below a conflict what to do about it."""
    kinds = max((len(change.kind) for change in changes), default=0)
    names = max((len(change.name) for change in changes), default=0)
    found = []
    for change in changes:
        found.append(
            f"{_MARKS[change.action]} {change.kind:<{kinds}}  {change.name:<{names}}  {change.detail}".rstrip()
        )
        if change.mend is not None:
            found.append(f"  {'':<{kinds}}  {'':<{names}}  {change.mend}")
    return found


def summary(plan: Plan) -> str:
    """How many of what, on one line."""
    counts = {action: sum(change.action is action for change in plan.changes or ()) for action in Action}
    words = {
        Action.CREATE: "to create",
        Action.UPDATE: "to change",
        Action.CONFLICT: "in conflict",
        Action.LEFTOVER: "left over",
    }
    told = ", ".join(f"{count} {words[action]}" for action, count in counts.items() if count)
    return f"vhost {plan.vhost}: {told or 'as described'}"


def document(plan: Plan) -> dict[str, object]:
    """The JSON document of `plan`, `check` and `apply`; its keys are stable. `differs` null: no broker was asked."""
    return {
        "vhost": plan.vhost,
        "differs": None if plan.changes is None else plan.differs,
        "changes": [change_document(change) for change in plan.changes or ()],
        "commands": list(plan.commands),
    }


def change_document(change: Change) -> dict[str, object]:
    """One difference; its keys are stable."""
    return {
        "action": change.action.value,
        "kind": change.kind,
        "name": change.name,
        "detail": change.detail,
        "mend": change.mend,
    }
