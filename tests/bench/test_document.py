"""The benchmark's document: what becomes of the runs, by hand-made ones whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.document import KEYS, document, table
from bench.errors import BenchFailed, Unavailable
from bench.proof import compare_shapes
from bench.step import Form, Step
from bench.suite import Outcome, chosen_steps, estimate_s

ROOT = Path(__file__).resolve().parent.parent.parent


def rate(turn: int, scenario: str, variant: str, msgs_per_s: float, **more: Any) -> dict[str, Any]:
    return {"scenario": scenario, "turn": turn, "variant": variant, "msgs_per_s": msgs_per_s, **more}


def outcome(*runs: dict[str, Any]) -> Outcome:
    return Outcome(Form("short", 3), list(runs))


def test_a_ratio_is_taken_within_a_turn() -> None:
    """A slow minute hits both; the ratio of the medians would be 30/20."""
    result = document(
        outcome(
            rate(1, "ceiling", "library 200", 10.0),
            rate(1, "ceiling", "library 1000", 9.0),
            rate(1, "drain", "delete", 5.0),
            rate(2, "ceiling", "library 200", 20.0),
            rate(2, "drain", "delete", 30.0),
            rate(3, "ceiling", "library 5000", 100.0),
            rate(3, "drain", "delete", 60.0),
        )
    )
    assert result["build"] == "pure"
    assert result["ceiling_msgs_s"] == 20.0
    assert result["drain_msgs_s"] == 30.0
    assert result["drain_ratio"] == 0.6
    assert result["spread"]["drain_ratio"] == {"min": 0.5, "max": 1.5, "turns": 3}
    assert result["targets"]["drain_ratio"] == {"target": "at least 0.9", "is_reached": False}


def test_peers_that_mark_stand_beside_both() -> None:
    result = document(
        outcome(rate(1, "drain", "delete", 50.0), rate(1, "drain", "mark", 40.0), rate(1, "peers", "gathered", 10.0))
    )
    assert (result["drain_vs_gathered"], result["drain_mark_vs_gathered"]) == (5.0, 4.0)


def test_the_tail_of_a_delay_is_reported_beside_its_middle() -> None:
    """Good rows came half a second late beside held ones, and the document showed 5 ms."""
    run = {"scenario": "isolation", "turn": 1, "variant": "held", "delay_p50_ms": 5.5, "delay_p99_ms": 424.8}
    result = document(outcome(run))
    assert (result["held_delay_p50_ms"], result["held_delay_p99_ms"]) == (5.5, 424.8)


@pytest.mark.parametrize("name", ["short", "short-b6e909f"])
def test_a_kept_document_has_the_figures_of_its_runs(name: str) -> None:
    """A key that comes later is computed from them, one that is renamed keeps its figure."""
    kept = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    form = Form(kept["form"], kept["settings"]["repeats"], kept["settings"]["scale"])
    made = document(Outcome(form, kept["runs"]))
    assert {key: kept.get(key) for key in made["spread"]} == {key: made[key] for key in made["spread"]}
    assert kept["spread"] == made["spread"]


def test_the_ceiling_is_the_librarys_own_call_and_the_joined_writes_stand_beside_it() -> None:
    result = document(outcome(rate(1, "ceiling", "library 200", 10.0), rate(1, "ceiling", "buffer 1000", 15.0)))
    assert result["ceiling_msgs_s"] == 10.0
    assert result["ceiling_joined_msgs_s"] == 15.0


def test_cpu_and_latency_are_the_best_of_the_turns() -> None:
    result = document(
        outcome(
            *(
                rate(turn, "drain", "delete", 1.0, cpu_us_per_msg={"publisher": us, "postgres": us, "rabbitmq": us})
                for turn, us in ((1, 14.0), (2, 11.0), (3, 30.0))
            ),
            *(
                {"scenario": "trickle", "turn": turn, "variant": "1000 a second", "p50_ms": ms, "p99_ms": 9.0}
                for turn, ms in ((1, 5.0), (2, 2.5))
            ),
        )
    )
    assert result["relay_cpu_us"] == 11.0
    assert result["trickle_1000_p50_ms"] == 2.5
    assert result["targets"]["trickle_1000_p50_ms"] == {"target": "at most 3", "is_reached": True}


def test_the_percentiles_of_a_rate_are_of_one_turn() -> None:
    """The best of each were taken: figures of a run that never was."""
    result = document(
        outcome(
            *(
                {
                    "scenario": "trickle",
                    "turn": turn,
                    "variant": "1000 a second",
                    "p50_ms": p50,
                    "p99_ms": p99,
                    "to_consumer": {"p50_ms": p50 + 1, "p99_ms": p99 + 1},
                }
                for turn, p50, p99 in ((1, 2.6, 5.9), (2, 2.5, 6.3), (3, 2.7, 12.0))
            )
        )
    )
    assert (result["trickle_1000_p50_ms"], result["trickle_1000_p99_ms"]) == (2.5, 6.3)
    assert (result["trickle_1000_consumer_p50_ms"], result["trickle_1000_consumer_p99_ms"]) == (3.5, 7.3)
    assert result["spread"]["trickle_1000_p99_ms"] == {"min": 5.9, "max": 12.0, "turns": 3}
    assert "trickle_1000_p99_9_ms" not in result


def test_what_was_not_measured_has_no_key_and_everything_else_has() -> None:
    result = document(outcome(rate(1, "drain", "delete", 5.0)))
    assert "drain_ratio" not in result
    assert "ceiling_msgs_s" not in result
    assert result["drain_msgs_s"] == 5.0
    assert "drain_msgs_s" in table(result)
    assert result["runs"] == [rate(1, "drain", "delete", 5.0)]


def test_keys_are_named_once() -> None:
    names = [key.name for key in KEYS]
    assert sorted(set(names)) == sorted(names)


def test_publishers_that_send_different_messages_are_not_compared() -> None:
    same = {"body_bytes": 250, "headers": {"a": "str"}}
    compare_shapes([{"shape": same}, {"shape": dict(same)}, {}, {"shape": {"body_bytes": 100, "headers": {}}}])
    with pytest.raises(BenchFailed, match="different messages"):
        compare_shapes([{"shape": same}, {"shape": {"body_bytes": 250, "headers": {"a": "int"}}}])


def test_the_short_form_stays_below_ten_minutes() -> None:
    form = Form("short", 3)
    assert estimate_s(form, chosen_steps(form, [])) < 600


def test_scenarios_are_chosen_by_name() -> None:
    form = Form("short", 3)
    assert {step.scenario for step in chosen_steps(form, ["start"])} == {"start"}


def test_a_step_has_a_deadline_well_above_its_estimate() -> None:
    def nothing(_: object) -> list[dict[str, Any]]:
        raise Unavailable("never called")

    assert Step("a", "b", 5.0, nothing).deadline_s == 110.0
