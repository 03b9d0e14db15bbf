"""Random histories: prints each failure with its end, made smaller; exit 1 on any.

`--result FILE` writes what was played and found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from .batch import Tally, play_all, play_some
from .shrink import Failure, failure, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many histories")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--failures", type=int, default=3, help="stop after so many failures")
    parser.add_argument("--without", type=lambda text: frozenset(text.split(",")), default=frozenset())
    parser.add_argument("--seconds", type=float, help="virtual time after which nothing more goes wrong")
    parser.add_argument("--result", type=Path, help="write a result file")
    options = parser.parse_args()
    if options.without or options.seconds is not None:
        return _play_parts(options)
    began = time.monotonic()
    total = Tally()
    seeds = range(options.first, options.first + options.seeds)
    for tally in play_all(seeds, options.processes) if len(seeds) > 1 else [play_some(seeds)]:
        total.add(tally)
        if sys.stderr.isatty():
            print(f"\r{options.first + total.played}", end="", file=sys.stderr)
        for found in tally.failures:
            _show(found)
        if len(total.failures) >= options.failures:
            break
    seconds = time.monotonic() - began
    print(
        f"{total.played} histories, {len(total.failures)} failed {[each.seed for each in total.failures] or ''}: "
        f"{total.committed} rows committed, {total.delivered} copies delivered, {total.duplicates} repeated, "
        f"{total.steps} steps, {seconds:.1f} s"
    )
    if options.result is not None:
        options.result.write_text(json.dumps(_document(options.first, total, seconds), indent=2) + "\n")
    return 1 if total.failures else 0


def _play_parts(options: argparse.Namespace) -> int:
    """Histories without some of their parts, as shrinking leaves them."""
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        found = failure(seed, options.without, options.seconds)
        if found is not None:
            failed += 1
            print(found.text, flush=True)
    print(f"{failed} of {options.seeds} failed")
    return 1 if failed else 0


def _show(found: Failure) -> None:
    smaller = shrink(found)
    print(f"seed {found.seed} fails by {found.kind}; the smallest that was found:\n{smaller.text}\n", flush=True)
    print(f"play it again: {smaller.command}\n", flush=True)


def _document(first: int, total: Tally, seconds: float) -> dict[str, object]:
    return {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "first_seed": first,
        "last_seed": first + total.played - 1,
        "histories": total.played,
        "rows_committed": total.committed,
        "copies_delivered": total.delivered,
        "copies_repeated": total.duplicates,
        "steps": total.steps,
        "seconds": round(seconds, 1),
        "findings": [
            {"seed": each.seed, "rule": each.kind, "first": each.text.splitlines()[:2]} for each in total.failures
        ],
    }


if __name__ == "__main__":
    raise SystemExit(main())
