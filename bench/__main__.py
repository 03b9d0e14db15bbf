"""`python -m bench`: run one scenario on private servers, print its table, write its result file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench import drain, peers
from bench.native import NativeFailed, NativeUnavailable
from bench.report import Report
from bench.rig import BenchFailed
from relay.errors import RelayError

SCENARIOS: dict[str, Callable[..., Report]] = {
    "drain": drain.run,
    "peers": peers.run,
}
"""By name; each takes rows, keys, repeats and `say` (a line of progress). A new scenario is a module and a line here."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures the relay on private servers.")
    parser.add_argument("scenario", nargs="?", default="drain", choices=SCENARIOS)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the result goes, such as bench/results/drain.json"
    )
    parser.add_argument("--rows", type=_positive, default=60_000, help="size of the backlog (default: %(default)s)")
    parser.add_argument("--keys", type=_positive, default=5_000, help="ordering keys (default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="turns over all variants (default: %(default)s)")
    options = parser.parse_args()
    try:
        report = SCENARIOS[options.scenario](
            rows=options.rows,
            keys=options.keys,
            repeats=options.repeats,
            say=lambda line: print(line, flush=True),
        )
    except (BenchFailed, NativeFailed, NativeUnavailable) as failed:
        print(f"bench: {failed}", file=sys.stderr)
        return 1
    except RelayError as failed:
        hint = f" ({failed.hint})" if failed.hint else ""
        print(f"bench: {failed}{hint}", file=sys.stderr)
        return failed.exit_code
    print(f"\n{report.text}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report.document(), indent=2, ensure_ascii=False) + "\n")
        print(f"\nwritten to {options.json}")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    raise SystemExit(main())
