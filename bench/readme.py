"""`python -m bench.readme`: puts the figures of bench/results/short.json into README.md and docs/benchmarks.md, between
their marks.

README quotes nothing else about speed; a test compares the pages with the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.document import KEYS

ROOT: Final = Path(__file__).parent.parent
RESULT: Final = ROOT / "bench" / "results" / "short.json"
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- figures: written by `python -m bench.readme` from bench/results/short.json -->"
END: Final = "<!-- end of figures -->"

PICTURES: Final = ("throughput", "latency", "cpu", "writers")
"""As bench/plots.py names them; that module is not imported here, for it brings matplotlib."""

NOT_MEASURED: Final = "not measured"
"""By a suite that lacked a program, or in this form."""

Result = Mapping[str, Any]


_BEST: Final = {key.name for key in KEYS if key.over is min or key.least is not None}


def _turns(r: Result, key: str) -> str:
    """What to say of a figure that is no median of the turns."""
    turns = r["spread"][key]["turns"]
    if turns == 1:
        return " (measured once)"
    return f" (best of {turns} turns)" if key in _BEST else ""


def _peers(r: Result) -> str:
    """By delete as defined, and by mark, which is what they do. A document of before they had uvloop names no loop of theirs."""
    gathered, one = r["gathered_ratio"], r["naive_ratio"]
    runs = [run for run in r["runs"] if run["scenario"] == "peers"]
    loop = "" if all("loop" in run for run in runs) else " (they ran on asyncio's own event loop, without uvloop)"
    return (
        f"{r['drain_ratio'] / gathered:.1f} × by `delete`, {r['drain_ratio_mark'] / gathered:.1f} × by `mark`; "
        f"{r['drain_ratio'] / one:.0f} ×, {r['drain_ratio_mark'] / one:.0f} ×{loop}"
    )


ROWS: Final[tuple[tuple[str, Callable[[Result], str]], ...]] = (
    ("drain of a backlog, `delete`", lambda r: f"{r['drain_msgs_s']:,.0f} messages a second"),
    (
        "… of what a C publisher reaches at the same broker",
        lambda r: f"{r['drain_ratio']:.2f} of {r['ceiling_msgs_s']:,.0f} (`mark`: {r['drain_ratio_mark']:.2f})",
    ),
    (
        "… classic queue, 50 keys, one hot key against C with a window of 1",
        lambda r: f"{r['drain_ratio_classic']:.2f}, {r['drain_ratio_50_keys']:.2f}, {r['hot_key_ratio']:.2f}",
    ),
    (
        "against a relay in aio-pika that marks, gathered; awaited one by one",
        _peers,
    ),
    (
        "commit to confirm at 1,000 rows a second, p50, p99",
        lambda r: (
            f"{r['trickle_1000_p50_ms']:.1f} ms, {r['trickle_1000_p99_ms']:.1f} ms{_turns(r, 'trickle_1000_p50_ms')}"
        ),
    ),
    (
        "a row that wakes an idle relay, p50",
        lambda r: f"{r['idle_wakeup_p50_ms']:.1f} ms{_turns(r, 'idle_wakeup_p50_ms')}",
    ),
    (
        "CPU a message: relay; PostgreSQL by `delete`, by `mark`",
        lambda r: (
            f"{r['relay_cpu_us']:.1f} µs; {r['postgres_cpu_us_delete']:.1f} µs, {r['postgres_cpu_us_mark']:.1f} µs"
            f"{_turns(r, 'relay_cpu_us')}"
        ),
    ),
    (
        "a read beside 100,000 sent rows; beside as many parked, deferred and held",
        lambda r: f"{r['claim_growth_1e5']:.2f} ×; {r['claim_growth_parked_1e5']:.2f} ×{_turns(r, 'claim_growth_1e5')}",
    ),
    (
        "writers' commit rate, against a plain outbox: single rows; batches of 100",
        lambda r: f"{r['writers_ratio_single']:.2f}; {r['writers_ratio_batch100']:.2f}",
    ),
    (
        "memory: idle; at most in that drain, more with larger bodies",
        lambda r: f"{r['idle_rss_mb']:.0f} MB; {r['peak_rss_mb']:.0f} MB",
    ),
    ("start to ready", lambda r: f"{r['start_to_ready_s']:.1f} s"),
)


def figures(result: Result) -> str:
    """The table, with a line that says what it was measured on."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"| measured on {machine['cores']} cores ({machine['cpu']}), RabbitMQ {versions['rabbitmq']}, quorum queue, "
        f"PostgreSQL {versions['postgresql']}, 250-byte bodies, 5,000 keys, the {result['build']} build; medians of "
        f"{result['settings']['repeats']} turns unless said | |",
        "| --- | --- |",
        *(f"| {name} | {_shown(figure, result)} |" for name, figure in ROWS),
    ]
    return "\n".join(lines)


def _shown(figure: Callable[[Result], str], result: Result) -> str:
    try:
        return figure(result)
    except KeyError:
        return NOT_MEASURED


def everything(result: Result) -> str:
    """Every key of the document: value, lowest and highest turn, what was aimed at."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"`bench/results/short.json`, {result['measured_at'][:10]}, relay {versions['relay']}: {machine['cores']} cores "
        f"({machine['cpu']}), kernel {machine['kernel']}, RabbitMQ {versions['rabbitmq']}, PostgreSQL {versions['postgresql']}, "
        f"Python {versions['python']}; {result['settings']['repeats']} turns, {result['took_s'] / 60:.0f} minutes.",
        "",
        "| key | value | lowest … highest | aim |",
        "| --- | --- | --- | --- |",
    ]
    for key in KEYS:
        if key.name not in result:
            lines.append(f"| `{key.name}` | {NOT_MEASURED} | | |")
        else:
            spread, target = result["spread"][key.name], result["targets"].get(key.name)
            aim = "" if target is None else f"{target['target']}: {'reached' if target['is_reached'] else '**missed**'}"
            turns = f"{spread['min']:,g} … {spread['max']:,g}" if spread["turns"] > 1 else "measured once"
            lines.append(f"| `{key.name}` | {result[key.name]:,g} | {turns} | {aim} |")
    pictures = [f"![{name}](../bench/results/{RESULT.stem}-{name}.png)" for name in PICTURES]
    return "\n".join([*lines, "", *pictures])


def quoting(text: str, quoted: str) -> str:
    """The page's text with this between its marks. Raises ValueError where a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks its marks: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{quoted}\n{END}{after}"


def main() -> int:
    if not RESULT.exists():
        print(f"bench.readme: there is no {RESULT.relative_to(ROOT)}: run `make bench` first", file=sys.stderr)
        return 1
    result = json.loads(RESULT.read_text())
    for step, why in result["skipped"].items():
        print(f"bench.readme: {NOT_MEASURED}: {step}: {why}")
    for page, write in PAGES.items():
        page.write_text(quoting(page.read_text(), write(result)))
        print(f"{page.relative_to(ROOT)} quotes {RESULT.relative_to(ROOT)}")
    return 0


PAGES: Final[Mapping[Path, Callable[[Result], str]]] = {README: figures, PAGE: everything}


if __name__ == "__main__":
    raise SystemExit(main())
