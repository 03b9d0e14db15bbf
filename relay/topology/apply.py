"""`relay topology plan | apply | check`: from a file to a comparison with a broker, and back to the broker.

Blocking throughout: one request after the other, each with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from relay.config import SETTINGS, Config, not_set
from relay.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigError, UsageError
from relay.management import ApiFailed, ApiRefused, ManagementApi
from relay.text import shell_words
from relay.topology import broker, fields
from relay.topology.changes import Action, Change
from relay.topology.commands import all_of, commands
from relay.topology.compare import compare
from relay.topology.expand import Expansion, expand
from relay.topology.file import read


@dataclass(frozen=True, slots=True)
class Plan:
    """`changes` None: no broker was asked. `commands` make by hand what is missing, or everything."""

    vhost: str
    changes: tuple[Change, ...] | None
    commands: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the broker is not what the file says; false where none was asked. Leftovers are none of the file's
        business.
        """
        return any(change.action is not Action.LEFTOVER for change in self.changes or ())


def wanted_by(path: str, vhost: str | None) -> Expansion:
    """What the file describes; `vhost` instead of the file's own. Raises ConfigError (its faults), UsageError (no file,
    no vhost's name).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8") from None
    topology = read(text, path)
    if vhost is None:
        return expand(topology)
    try:
        return expand(replace(topology, vhost=fields.some_text(vhost)))
    except ValueError as error:
        raise UsageError(f"--vhost {vhost!r}: {error}; allowed: a vhost's name") from None


def plan(config: Config, wanted: Expansion) -> Plan:
    """What would be done; without RELAY_MANAGEMENT_URL everything, as commands. Raises BrokerError."""
    url = config.management()
    if url is None:
        return Plan(wanted.vhost, None, tuple(commands(wanted, all_of(wanted))))
    try:
        return _planned(ManagementApi(url), wanted)
    except ApiFailed as failure:
        raise _mapped(failure) from failure


def check(config: Config, wanted: Expansion) -> Plan:
    """As `plan`, but a broker is asked. Raises ConfigError without RELAY_MANAGEMENT_URL."""
    _demand(config)
    return plan(config, wanted)


def apply(config: Config, wanted: Expansion, on_change: Callable[[Change], None]) -> Plan:
    """Make every change that can be made, telling `on_change` of each; what differs still is the plan that is returned.

    Raises BrokerError midway, where the broker refuses: what was declared stays, and a repetition goes on from there.
    """
    url = _demand(config)
    try:
        api = ManagementApi(url)
        for change in _planned(api, wanted).changes or ():
            if change.wanted is not None:
                broker.declare(api, wanted.vhost, change.wanted)
                on_change(change)
        return _planned(api, wanted)
    except ApiFailed as failure:
        raise _mapped(failure) from failure


def _planned(api: ManagementApi, wanted: Expansion) -> Plan:
    found = broker.look(api, wanted)
    if found is None:
        mend = f"{shell_words(['rabbitmqctl', 'add_vhost', wanted.vhost])}, or name another by --vhost"
        missing = Change(Action.CONFLICT, "vhost", wanted.vhost, "there is none, or this user may not see it", mend)
        return Plan(wanted.vhost, (missing,), ())
    changes = compare(wanted, found)
    lines = commands(wanted, (change.wanted for change in changes if change.wanted is not None))
    return Plan(wanted.vhost, tuple(changes), tuple(lines))


def _demand(config: Config) -> str:
    if (url := config.management()) is None:
        (setting,) = (setting for setting in SETTINGS if setting.variable == "RELAY_MANAGEMENT_URL")
        raise ConfigError(
            [not_set(setting)],
            hint="without it `relay topology plan` prints the rabbitmqctl lines",
        )
    return url


def _mapped(failure: ApiFailed) -> BrokerError:
    if isinstance(failure, ApiRefused):
        hint = (
            "the user of RELAY_MANAGEMENT_URL needs the tag `administrator`, or `policymaker` and rights in the vhost"
        )
        return BrokerRefused(str(failure), hint=hint if failure.status in (401, 403) else None)
    return BrokerUnavailable(
        str(failure), hint="is it up, and has RELAY_MANAGEMENT_URL the port of the management API?"
    )
