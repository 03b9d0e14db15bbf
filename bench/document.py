"""The result: one JSON document whose keys are computed from the runs alone, each by one line of a table.

Ratios are taken within a turn and their median is reported: what is compared ran within the same minutes. Latencies and CPU are
the best of the turns (a machine's other work only ever adds to them), everything else the median. All percentiles at a rate are of
one turn, that of the lowest p50 to the confirm: picked each for itself, they would be of a run that never was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bench.machine import machine, versions
from bench.step import Run
from bench.suite import Outcome

Figures = Mapping[str, Mapping[str, Run]]
"""One turn's runs, by scenario and variant."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the document: how it is read from a turn (KeyError, ValueError: not measured), and from the turns: `over` all
    of them, or from the one whose `least` is.
    """

    name: str
    read: Callable[[Figures], float]
    over: Callable[[Sequence[float]], float] = statistics.median
    target: float | None = None
    is_at_least: bool = True
    digits: int = 3
    least: Callable[[Figures], float] | None = None

    def figure(self, turns: Sequence[Figures], values: Sequence[float]) -> float:
        """Of the turns in which it was measured."""
        if self.least is None:
            return self.over(values)
        ranks = list(map(self.least, turns))
        return values[ranks.index(min(ranks))]

    def is_reached(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.is_at_least else value <= self.target


def _value(scenario: str, variant: str, *path: str) -> Callable[[Figures], float]:
    def read(turn: Figures) -> float:
        found: Any = turn[scenario][variant]
        for name in path or ("msgs_per_s",):
            found = found[name]
        return float(found)

    return read


def _best(variants: Iterable[str]) -> Callable[[Figures], float]:
    names = tuple(variants)
    return lambda turn: max(turn["ceiling"][name]["msgs_per_s"] for name in names if name in turn["ceiling"])


def _ratio(above: Callable[[Figures], float], below: Callable[[Figures], float]) -> Callable[[Figures], float]:
    return lambda turn: above(turn) / below(turn)


_LIBRARY = [f"library {window}" for window in (200, 1_000, 5_000)]
_CEILING = _best(_LIBRARY)
_CLASSIC = _best(f"classic {name}" for name in _LIBRARY)
_DELETE, _MARK = _value("drain", "delete"), _value("drain", "mark")
_C_50, _C_1 = _value("ceiling", "window 50"), _value("ceiling", "window 1")
_RATES = (10, 100, 1_000, 2_000, 5_000)


def _most(name: str, *variants: str) -> Callable[[Figures], float]:
    return lambda turn: max(turn["drain"][variant][name] for variant in variants)


def _latencies(infix: str, *path: str) -> Iterator[Key]:
    targets = {"trickle_1000_p50_ms": 3.0, "trickle_1000_p99_ms": 10.0}
    for rate in _RATES:
        run = f"{rate} a second"
        # At ten a second no form is long enough for a thousand rows.
        for name in ("p50_ms", "p99_ms", "p99_9_ms") if rate > 10 else ("p50_ms", "p99_ms"):
            key = f"trickle_{rate}_{infix}{name}"
            read, least = _value("trickle", run, *path, name), _value("trickle", run, "p50_ms")
            yield Key(key, read, target=targets.get(key), is_at_least=False, least=least)


KEYS: Final[tuple[Key, ...]] = (
    Key("ceiling_msgs_s", _CEILING, digits=1),
    Key("ceiling_joined_msgs_s", _value("ceiling", "buffer 1000"), digits=1),
    Key("ceiling_classic_msgs_s", _CLASSIC, digits=1),
    Key("drain_msgs_s", _DELETE, digits=1),
    Key("drain_mark_msgs_s", _MARK, digits=1),
    Key("drain_ratio", _ratio(_DELETE, _CEILING), target=0.90),
    Key("drain_ratio_mark", _ratio(_MARK, _CEILING), target=0.80),
    Key("drain_ratio_classic", _ratio(_value("drain", "classic"), _CLASSIC), target=0.90),
    Key("drain_ratio_apart", _ratio(_value("drain", "apart"), _value("ceiling", "apart library 1000"))),
    Key("drain_ratio_50_keys", _ratio(_value("drain", "50 keys"), _CEILING), target=0.45),
    Key("drain_ratio_50_keys_vs_c_window_50", _ratio(_value("drain", "50 keys"), _C_50), target=0.75),
    Key("hot_key_ratio", _ratio(_value("drain", "hot key"), _C_1), target=0.80),
    Key("naive_ratio", _ratio(_value("peers", "one"), _CEILING)),
    Key("gathered_ratio", _ratio(_value("peers", "gathered"), _CEILING)),
    Key("drain_vs_gathered", _ratio(_DELETE, _value("peers", "gathered")), target=4.0),
    Key("drain_mark_vs_gathered", _ratio(_MARK, _value("peers", "gathered"))),
    Key("relay_cpu_us", _value("drain", "delete", "cpu_us_per_msg", "publisher"), min, 12.0, False, 2),
    Key("relay_cpu_us_mark", _value("drain", "mark", "cpu_us_per_msg", "publisher"), min, digits=2),
    Key("postgres_cpu_us_delete", _value("drain", "delete", "cpu_us_per_msg", "postgres"), min, 12.0, False, 2),
    Key("postgres_cpu_us_mark", _value("drain", "mark", "cpu_us_per_msg", "postgres"), min, 20.0, False, 2),
    Key("rabbitmq_cpu_us", _value("drain", "delete", "cpu_us_per_msg", "rabbitmq"), min, digits=2),
    *_latencies(""),
    *_latencies("consumer_", "to_consumer"),
    Key("idle_wakeup_p50_ms", _value("trickle", "wake-up", "p50_ms"), min, 3.0, False),
    Key("idle_wakeup_consumer_p50_ms", _value("trickle", "wake-up", "to_consumer", "p50_ms"), min),
    *(
        Key(name, _value("growth", variant, "growth"), target=limit, is_at_least=False)
        for name, variant, limit in (
            ("claim_growth_1e5", "sent", 1.1),
            ("claim_growth_1e6", "many sent", 1.1),
            ("claim_growth_1e5_two_relays", "two relays", None),
            ("claim_growth_parked_1e5", "aside", 1.1),
            ("claim_growth_old_snapshot_1e5", "old snapshot", 2.0),
            ("claim_growth_open_writer", "open writer", 2.0),
        )
    ),
    *(
        Key(name, _value("writers", variant, "ratio"), target=limit)
        for name, variant, limit in (
            ("writers_ratio_single", "8 writers, single rows", 0.95),
            ("writers_ratio_batch100", "8 writers, batches of 100", 0.95),
            ("writers_ratio_busy", "busy, 8 writers, single rows", None),
            ("writers_ratio_busy_batch100", "busy, 8 writers, batches of 100", None),
            ("writers_ratio_1_single", "1 writers, single rows", None),
            ("writers_ratio_1_batch100", "1 writers, batches of 100", None),
        )
    ),
    Key("held_delay_p50_ms", _value("isolation", "held", "delay_p50_ms"), min),
    Key("held_delay_p99_ms", _value("isolation", "held", "delay_p99_ms"), min),
    Key("poison_delay_ms", _value("isolation", "poison", "delay_ms"), min),
    Key("recovery_drained_s", _value("recovery", "broker restart", "drained_s")),
    Key("sink_msgs_s", _value("sink", "relay"), digits=1),
    Key("sink_relay_cpu_us", _value("sink", "relay", "cpu_us_per_msg", "publisher"), min, digits=2),
    Key("encoder_msgs_s", _value("sink", "encoder"), digits=1),
    Key("encoder_cpu_us", _value("sink", "encoder", "cpu_us_per_msg", "publisher"), min, digits=2),
    Key("consumer_msgs_s", _value("consumer", "consumer"), digits=1),
    Key("asyncpg_alone_msgs_s", _value("consumer", "alone"), digits=1),
    Key("consumer_ratio", _ratio(_value("consumer", "consumer"), _value("consumer", "alone")), target=0.60),
    Key("consumer_cpu_us", _value("consumer", "consumer", "cpu_us_per_msg", "consumer"), min, digits=2),
    Key("inbox_msgs_s", _value("inbox", "sidecar"), digits=1),
    Key("inbox_cpu_us", _value("inbox", "sidecar", "cpu_us_per_msg", "consumer"), min, digits=2),
    Key("peak_rss_mb", _most("peak_rss_mb", "delete", "mark"), target=80.0, is_at_least=False, digits=1),
    Key("idle_rss_mb", _value("start", "idle", "idle_rss_mb"), target=50.0, is_at_least=False, digits=1),
    Key("start_to_ready_s", _value("start", "idle", "start_to_ready_s"), target=1.5, is_at_least=False),
    Key("wal_bytes_per_row_delete", _value("drain", "delete", "wal_bytes_per_row"), digits=1),
    Key("wal_bytes_per_row_mark", _value("drain", "mark", "wal_bytes_per_row"), digits=1),
    Key("wal_bytes_per_row_insert", _value("writers", "8 writers, batches of 100", "wal_bytes_per_row"), digits=1),
)


def document(outcome: Outcome) -> dict[str, Any]:
    """The file's content: every key that could be computed at the top, then spreads, targets and all runs."""
    turns = [_turn(outcome.runs, number) for number in range(1, outcome.form.repeats + 1)]
    figures: dict[str, float] = {}
    spread: dict[str, dict[str, Any]] = {}
    targets: dict[str, dict[str, Any]] = {}
    for key in KEYS:
        found = [(turn, value) for turn in turns if (value := _read(key, turn)) is not None]
        if not found:
            continue
        values = [value for _, value in found]
        figures[key.name] = value = round(key.figure([turn for turn, _ in found], values), key.digits)
        spread[key.name] = {
            "min": round(min(values), key.digits),
            "max": round(max(values), key.digits),
            "turns": len(values),
        }
        if (is_reached := key.is_reached(value)) is not None:
            sign = "at least" if key.is_at_least else "at most"
            targets[key.name] = {"target": f"{sign} {key.target:g}", "is_reached": is_reached}
    return {
        **figures,
        "form": outcome.form.name,
        "build": outcome.build,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(outcome.seconds, 1),
        "machine": machine(),
        "versions": {**versions(), **outcome.versions},
        "settings": {
            "repeats": outcome.form.repeats,
            "scale": outcome.form.scale,
            "postgresql": "durable (fsync, synchronous_commit on), otherwise its defaults; a new database for each run",
            "rabbitmq": "two schedulers, no plugins; a new queue for each run, bound with # to a topic exchange",
            "relay": "its defaults but RELAY_SENT_ROWS; delete unless said",
            "load": "250 bytes of JSON, 5,000 keys, a quorum queue, strict order, unless said",
        },
        "spread": spread,
        "targets": targets,
        "skipped": dict(outcome.skipped),
        "failed": dict(outcome.failed),
        "runs": list(outcome.runs),
    }


def _turn(runs: Sequence[Run], number: int) -> Figures:
    found: dict[str, dict[str, Run]] = {}
    for run in runs:
        if run["turn"] == number:
            found.setdefault(run["scenario"], {})[run["variant"]] = run
    return found


def _read(key: Key, turn: Figures) -> float | None:
    try:
        return key.read(turn)
    except (KeyError, ValueError):  # not measured in this turn: skipped, failed, or only once
        return None


def table(result: Mapping[str, Any]) -> str:
    """The keys for a terminal: value, spread, target."""
    lines = []
    for key in KEYS:
        if key.name in result:
            spread, target = result["spread"][key.name], result["targets"].get(key.name)
            mark = "" if target is None else f"{target['target']}: {'reached' if target['is_reached'] else 'MISSED'}"
            width = f"{spread['min']:>10,g} …{spread['max']:>10,g}"
            lines.append(f"{key.name:<36}{result[key.name]:>12,g}   {width}   {mark}".rstrip())
    return "\n".join(lines)
