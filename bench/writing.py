"""Writers, by PostgreSQL's own load generator `pgbench`: a fixed rate of commits, or as many as the server takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.errors import BenchFailed, Unavailable
from bench.load import EVENT_TYPE
from bench.rig import Rig
from relay.servers import find_postgres

SLACK_S: Final = 60.0
PAYLOAD: Final = '{"order_id": "42", "note": "' + "x" * 222 + '"}'
KEYS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the writers, Unix times: when it was due, when it returned, and the ids of its rows."""

    due_at: float
    committed_at: float
    ids: tuple[str, ...]


def insert(table: str, prefix: str, rows: int) -> str:
    """A pgbench script: `rows` rows in one commit, with ids that say which writer's which commit it was."""
    row_id = f"'{prefix}-' || :client_id || '-' || :n"
    columns = "(id, event_type, aggregate_type, aggregate_id, payload)"
    # Drawn for each row: the rows of one commit, and those of the next, are of other keys.
    row = f"'{EVENT_TYPE}', 'customer', 'c-' || floor(random() * {KEYS})::int, '{PAYLOAD}'"
    if rows == 1:
        values = f"values ({row_id}, {row})"
    else:
        values = f"select {row_id} || '-' || i, {row} from generate_series(1, {rows}) i"
    return f"\\set n :n + 1\ninsert into {table} {columns} {values};\n"


def write_at(rig: Rig, database: str, prefix: str, commits_per_s: float, seconds: int, rows: int = 1) -> list[Commit]:
    """Open loop: commits arrive at random (Poisson) at this rate, whatever the server does; one that finds all writers
    busy waits, and is counted from the moment it was due. Returns when the last is in. Raises Unavailable, BenchFailed.
    """
    log = rig.directory / f"{prefix}.commits"
    options = ("--rate", str(commits_per_s), "--log", f"--log-prefix={log}", "--time", str(seconds))
    _pgbench(rig, database, insert("outbox", prefix, rows), 8, options, seconds)
    (path,) = rig.directory.glob(f"{prefix}.commits.*")
    commits: list[Commit] = []
    counts: dict[str, int] = {}
    for line in path.read_text().splitlines():
        # client, transaction, microseconds since it was due, script, then the end as Unix seconds and microseconds
        client, _, took_us, _, end_s, end_us, *_ = line.split()
        counts[client] = number = counts.get(client, 0) + 1
        first = f"{prefix}-{client}-{number}"
        ids = (first,) if rows == 1 else tuple(f"{first}-{i}" for i in range(1, rows + 1))
        end = int(end_s) + int(end_us) / 1e6
        commits.append(Commit(end - int(took_us) / 1e6, end, ids))
    path.unlink()
    if not commits:
        raise BenchFailed(f"pgbench committed nothing at {commits_per_s:g} a second for {seconds} s")
    return commits


def commits_per_s(rig: Rig, database: str, table: str, writers: int, seconds: int, rows: int = 1) -> float:
    """Closed loop: how many commits `writers` writers reach together. Raises Unavailable, BenchFailed."""
    script = insert(table, f"{table}-{rig.wal_bytes()}", rows)
    output = _pgbench(rig, database, script, writers, ("--time", str(seconds)), seconds)
    found = re.search(r"^tps = ([0-9.]+) \(without initial connection time\)", output, re.MULTILINE)
    if found is None:
        raise BenchFailed(f"pgbench says no rate:\n{output}")
    return float(found[1])


def _program() -> Path:
    beside = find_postgres() / "pgbench"
    if beside.exists():
        return beside
    elsewhere = shutil.which("pgbench")
    if elsewhere is None:
        raise Unavailable("no pgbench: it comes with PostgreSQL (Debian: postgresql; elsewhere postgresql-contrib)")
    return Path(elsewhere)


def _pgbench(rig: Rig, database: str, script: str, clients: int, options: Sequence[str], seconds: int) -> str:
    path = rig.directory / f"{database}.pgbench.sql"
    path.write_text(script)
    common = ("--no-vacuum", "--protocol=prepared", "--client", str(clients), "--define", "n=0", "--file", str(path))
    outcome = subprocess.run(
        [str(_program()), *common, *options, rig.postgres.url(database)],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=seconds + SLACK_S,
    )
    if outcome.returncode != 0:
        raise BenchFailed(f"pgbench: exit {outcome.returncode}: {outcome.stderr.strip()[-600:]}")
    return outcome.stdout
