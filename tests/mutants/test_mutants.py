"""Every mutant fits the code as it is, every row of the protocol's table has one, and random histories find each."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.sim.seeds import play

from .hunt import MUTANTS, hunt, hunt_all
from .patch import DoesNotApply, Mutant, edit, function_at, planted

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_fits(mutant: Mutant) -> None:
    """When the code moves on, the mutant moves with it."""
    before = [function_at(each.where).__code__ for each in mutant.edits]
    with planted(mutant):
        assert all(
            function_at(each.where).__code__ is not code for each, code in zip(mutant.edits, before, strict=True)
        )
    assert [function_at(each.where).__code__ for each in mutant.edits] == before


def test_every_rule_of_the_table_has_one() -> None:
    table = PROTOCOL.read_text().partition("## The history that breaks each rule's absence")[2]
    rules = [row.strip(" |").replace("`", "") for row in re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)][2:]
    assert len(rules) > 30
    planted_rules = {mutant.rule.partition(":")[0] for mutant in MUTANTS}
    assert [rule for rule in rules if rule not in planted_rules] == []


def test_one_is_found_at_once() -> None:
    """What most users would notice first: rows are marked before their confirm."""
    (mutant,) = (each for each in MUTANTS if each.name == "mark_before_confirm")
    found = hunt(mutant, 20)
    assert found.kind == "I1"
    assert found.seed is not None
    play(found.seed)


def test_one_that_does_not_fit_changes_nothing() -> None:
    where = "relay.core.reading:Reading.floor"
    code = function_at(where).__code__
    for change in (edit(where, ("not there", "")), edit(where, ("floor", ""))):
        with pytest.raises(DoesNotApply), planted(Mutant("x", "x", (change,))):
            pass
    assert function_at(where).__code__ is code


@pytest.mark.long
def test_random_histories_find_each() -> None:
    found = list(hunt_all([mutant.name for mutant in MUTANTS], processes=os.cpu_count() or 1))
    assert [each.name for each in found if each.seed is None] == []
