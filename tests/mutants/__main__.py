"""`python -m tests.mutants [NAME …]`: plants each bug and says which random history finds it; exit 1 if none does."""

from __future__ import annotations

import argparse
import os

from .hunt import MUTANTS, hunt_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants; none: all")
    parser.add_argument("--seeds", type=int, help="so many each, instead of its own bound")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    rules = {mutant.name: mutant.rule for mutant in MUTANTS}
    unknown = sorted(set(options.names) - set(rules))
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}; there are {', '.join(rules)}")
    missing = 0
    for found in hunt_all(options.names or list(rules), options.processes, options.seeds):
        missing += found.seed is None
        seed = "not found" if found.seed is None else f"seed {found.seed}"
        print(f"{found.name:20} {seed:10} {found.kind:12} {rules[found.name]}\n{'':20} {found.first[:160]}", flush=True)
    print(f"{len(options.names or rules) - missing} found, {missing} not")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
