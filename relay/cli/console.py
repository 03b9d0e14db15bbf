"""What the commands share: where words go, secrets kept out of them, progress on a terminal, a parser like the others."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from relay.build import VERSION
from relay.errors import ConfigError, RelayError
from relay.text import columns, printable, printable_json

if TYPE_CHECKING:
    import asyncio

    from relay.config import Config


EXIT_CODES: Final = "Exit codes: 0 done, 1 failed, 2 configuration or usage, 3 schema incompatible"
OWN_NO: Final = 'the command\'s own "no"'
NOTHING_MATCHED: Final = "nothing matched"
CUT_SHORT: Final = "the grace ran out, or a second signal came, with work unsettled"

STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Console:
    """Where a command's words go, and its environment. Secrets are redacted once they are known."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.redact: Callable[[str], str] = str
        self.warnings: tuple[str, ...] = ()

    def config(self, command: str, *, spared: Iterable[str] = ()) -> Config:
        """The configuration as `command` uses it; `spared` settings need not be set. Raises ConfigError."""
        from relay.config import load, needed_by, used_by

        needs = needed_by(command) - frozenset(spared)
        config, self.warnings = load(self.environ, needs=needs, uses=used_by(command))
        self.redact = config.redactor.redact
        return config

    def warn(self) -> None:
        """The configuration's warnings, as lines."""
        for warning in self.warnings:
            self.note(f"warning: {warning}")

    def note(self, text: str) -> None:
        print(f"relay: {self.shown(text)}", file=sys.stderr)

    def shown(self, text: str) -> str:
        """As it may stand on a terminal: no secret, and nothing that would command it."""
        return printable(self.redact(text))

    def unlearned(self) -> Console:
        """For words that hold no password of ours, and must stay as they are where one is an ordinary word: commands. What
        is plain to see in a URL is masked all the same.
        """
        from relay.redaction import mask_urls

        other = Console(self.environ)
        other.redact = mask_urls
        return other

    def complain(self, error: RelayError) -> None:
        """An error for a person: its text, for a configuration each problem on a line, and the hint."""
        if isinstance(error, ConfigError):
            many = f"{len(error.problems)} problems" if len(error.problems) > 1 else "a problem"
            self.note(f"the configuration has {many}")
            for problem in error.problems:
                print(f"  {self.shown(problem)}", file=sys.stderr)
        else:
            self.note(error.message)
        if error.hint:
            print(f"  {self.shown(error.hint)}", file=sys.stderr)

    def confess(self, error: Exception) -> None:
        """A fault of ours: with its traceback, redacted, for the bug report."""
        import traceback

        from relay.redaction import mask_urls

        text = "".join(traceback.format_exception(error))
        print(mask_urls(self.redact(text)), end="", file=sys.stderr)
        self.note("this is a fault of relay itself; please report the lines above")


class Screen:
    """Progress on a terminal: steps as lines, and one last line that is rewritten. Nothing in a pipe."""

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._shown = ""
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        if self._is_live:
            self.clear()
            print(f"{time.monotonic() - self._began:5.1f} s  {text}", file=sys.stderr)

    def gauge(self, text: str) -> None:
        if self._is_live:
            print(f"\r{text:<{len(self._shown)}}", end="", file=sys.stderr, flush=True)
            self._shown = text

    def clear(self) -> None:
        if self._shown:
            print(f"\r{'':<{len(self._shown)}}\r", end="", file=sys.stderr, flush=True)
            self._shown = ""


class Parser(argparse.ArgumentParser):
    """A parser whose help ends with the settings that its own command needs, and with what its exit codes mean."""

    exit_4: str | None = OWN_NO
    """What the exit code 4 says; None for a command that has none."""

    def format_help(self) -> str:
        codes = EXIT_CODES if self.exit_4 is None else f"{EXIT_CODES},\n4 {self.exit_4}"
        self.epilog = f"Settings come from the environment; docs/configuration.md has all.\n{self._needs()}{codes}.\n"
        return super().format_help()

    def _needs(self) -> str:
        from relay.settings import COMMANDS, SETTINGS, needed_by

        words = self.prog.removeprefix("relay").strip()
        # What stands below a group (`parked list`) has the group's settings; `relay` itself and `inbox` have none.
        command = next((name for name in COMMANDS if words == name or words.startswith(f"{name} ")), None)
        needed = needed_by(command) if command is not None else frozenset()
        names = " ".join(setting.variable for setting in SETTINGS if setting.variable in needed)
        return f"This command needs {names}.\n" if names else ""


Perform = Callable[[argparse.Namespace, Console], int]


def add_command(
    commands: Commands,
    name: str,
    perform: Perform | None,
    text: str,
    *,
    exit_4: str | None = None,
) -> Parser:
    """A command, or with nothing to `perform` a group of them. `exit_4` says when it ends with 4."""
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"relay {VERSION}")
    if perform is not None:
        parser.set_defaults(perform=perform)
        parser.exit_4 = exit_4
    return parser


def wait_for(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a command's work. Each of `STOPS` interrupts it, so that it cleans up and says how far it came; another one interrupts
    the cleaning up.
    """
    import asyncio

    async def interruptible() -> Any:
        task = asyncio.current_task()
        assert task is not None, "run by asyncio"
        for number in _heeded():
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def stop_signals() -> asyncio.Event:
    """Set by the first of `STOPS`; a second one ends the process."""
    import asyncio

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def stop_once() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    numbers = _heeded()
    for number in numbers:
        loop.add_signal_handler(number, stop_once)
    return stop


def _heeded() -> list[signal.Signals]:
    """Those of `STOPS` that this process was not started deaf to (nohup, a shell's background)."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def print_lines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        print(console.shown(line))


def print_columns(lines: Sequence[Sequence[str]], console: Console) -> None:
    print_lines(columns([[console.redact(cell) for cell in line] for line in lines]), console)


def print_json(document: Mapping[str, object], console: Console) -> None:
    import json

    from relay.redaction import redacted

    is_unicode = "utf" in (sys.stdout.encoding or "").lower()
    print(printable_json(json.dumps(redacted(document, console.redact), indent=2, ensure_ascii=not is_unicode)))
