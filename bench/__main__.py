"""`python -m bench`: the whole suite, or some of its scenarios, on private servers; one JSON document and plots."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import compiled, suite
from bench.document import document, table
from bench.errors import Unavailable
from bench.scenarios import SCENARIOS
from bench.step import Form
from relay.errors import RelayError

REPEATS = {"short": 3, "long": 5}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.scenarios if name not in SCENARIOS]:
        parser.error(f"there is no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if options.json is not None:
        try:
            _expect_writable(options.json)
        except OSError as error:
            parser.error(f"--json {options.json}: {error.strerror}")
    name = "long" if options.long else "short"
    form = Form(name, options.repeats or REPEATS[name], options.scale)
    steps = suite.chosen_steps(form, options.scenarios)
    _say(f"{name} form, {form.repeats} repeats of {', '.join(options.scenarios or SCENARIOS)}")
    _say(f"about {suite.estimate_s(form, steps) / 60:.0f} minutes on two quiet cores; nothing else should be running")
    build = _use(options.build)
    try:
        outcome = suite.run(form, steps, _say)
        outcome.build = build
    except RelayError as failed:
        hint = f" ({failed.hint})" if failed.hint else ""
        print(f"bench: {failed}{hint}", file=sys.stderr)
        return failed.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted; nothing is reported", file=sys.stderr)
        return 1
    result = document(outcome)
    _say(f"\n{table(result)}\n")
    for step, why in outcome.skipped.items():
        _say(f"skipped: {step}: {why}")
    if outcome.failed:
        return _report_failure(result, options.json)
    if options.json is not None:
        _write(options.json, result)
        _draw(options.json, result)
    return 0


def _use(build: str) -> str:
    """Let all programs under measurement be of this build, if it can be had; which one they are of."""
    if build == "compiled":
        _say("compiling the relay, if it is not yet: a minute")
        try:
            os.environ |= compiled.environment(compiled.compiled_tree())
        except Unavailable as missing:
            _say(f"PURE Python is measured: {missing}")
            return "pure"
    return build


def _report_failure(result: dict[str, object], path: Path | None) -> int:
    """A disturbed suite is no result: it goes into a file of another name, for whoever looks why."""
    assert isinstance(result["failed"], dict)
    for step, why in result["failed"].items():
        print(f"bench: failed: {step}: {why}", file=sys.stderr)
    if path is not None:
        _write(path.with_suffix(".failed.json"), result)
    return 1


def _expect_writable(path: Path) -> None:
    """Before anything is measured for it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink()


def _write(path: Path, result: dict[str, object]) -> None:
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    _say(f"written to {path}")


def _draw(path: Path, result: dict[str, object]) -> None:
    try:
        from bench import plots
    except ImportError as missing:
        _say(f"no pictures: {missing.name} is not installed (it comes with `make setup`)")
        return
    for picture in plots.draw(result, path.with_suffix("")):
        _say(f"drawn {picture}")


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measures the relay on private servers.", allow_abbrev=False
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"some of {', '.join(SCENARIOS)} (default: all)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_true", help="three repeats, under ten minutes (default)")
    form.add_argument("--long", action="store_true", help="five repeats of larger backlogs and longer trickles; hours")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the document goes")
    parser.add_argument("--repeats", type=_positive, metavar="N", help="turns over all repeated steps")
    parser.add_argument(
        "--build", choices=("compiled", "pure"), default="compiled", help="which build of the relay (default: compiled)"
    )
    parser.add_argument(
        "--scale", type=_share, default=1.0, metavar="X", help="a part of the rows and seconds, for a quick look: 0.1"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0.0 < number <= 1.0:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    # As Ctrl-C: the servers and the relay are ended, nothing is reported.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
