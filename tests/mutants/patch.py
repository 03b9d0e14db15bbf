"""Plants a bug: a few words of one method's source are replaced, in this process and for a while.

The replacement must fit exactly once: when the code moves on, planting fails loudly instead of changing nothing.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

_ANNOTATIONS = __future__.annotations.compiler_flag


class DoesNotApply(Exception):
    """The text that a mutant replaces is not there, or not once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """`where`: `module:Class.method`. `changes`: (old, new) texts, whole lines or parts of them."""

    where: str
    changes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`rule`: the row of docs/protocol.md's last table, or what else is taken away."""

    name: str
    rule: str
    edits: tuple[Edit, ...]
    seeds_max: int = 3000
    """Within so many seeds, from 0 on, one finds it."""


def edit(where: str, *changes: tuple[str, str]) -> Edit:
    return Edit(where, changes)


def function_at(where: str) -> FunctionType:
    module_name, _, path = where.partition(":")
    found: object = importlib.import_module(module_name)
    for part in path.split("."):
        found = inspect.getattr_static(found, part, None)
        if found is None:
            raise DoesNotApply(f"{where}: there is no {part}")
    found = found.fget if isinstance(found, property) else found
    if not isinstance(found, FunctionType):
        raise DoesNotApply(f"{where} is no function")
    return found


def edited(change: Edit) -> FunctionType:
    """The function with its changes, compiled where it stands."""
    function = function_at(change.where)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in change.changes:
        if source.count(old) != 1:
            raise DoesNotApply(f"{change.where}: {source.count(old)} times, not once: {old!r}")
        source = source.replace(old, new)
    # Without its decorators, which have been applied to the original already.
    begin = re.search(r"^(async )?def ", source, re.MULTILINE)
    assert begin is not None, change.where
    code = compile(source[begin.start() :], f"<{change.where}, changed>", "exec", _ANNOTATIONS)
    made: dict[str, FunctionType] = {}
    exec(code, function.__globals__, made)
    (result,) = made.values()
    return result


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Raises DoesNotApply, with nothing changed."""
    changed = [(function_at(each.where), edited(each)) for each in mutant.edits]
    codes = [(function, function.__code__) for function, _ in changed]
    try:
        for function, replacement in changed:
            function.__code__ = replacement.__code__
        yield
    finally:
        for function, code in codes:
            function.__code__ = code
