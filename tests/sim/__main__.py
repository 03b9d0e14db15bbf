"""`python -m tests.sim --seeds N --from K`: random histories; prints each failure with its end; exit 1 on any."""

from __future__ import annotations

import argparse
import sys
import time

from .seeds import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many histories")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--failures", type=int, default=3, help="stop after so many failures")
    options = parser.parse_args()
    began = time.monotonic()
    failed: list[int] = []
    committed = delivered = duplicates = steps = played = 0
    for seed in range(options.first, options.first + options.seeds):
        played += 1
        try:
            result = play(seed)
        except Exception as error:  # noqa: BLE001 - whatever a history raises is its finding
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}\n", flush=True)
            if len(failed) >= options.failures:
                break
            continue
        committed += result.committed
        delivered += result.delivered
        duplicates += result.duplicates
        steps += result.steps
        if sys.stderr.isatty():
            print(f"\r{seed}", end="", file=sys.stderr)
    print(
        f"{played} histories, {len(failed)} failed {failed or ''}: {committed} rows committed, {delivered} copies "
        f"delivered, {duplicates} repeated, {steps} steps, {time.monotonic() - began:.1f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
