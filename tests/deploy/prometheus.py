"""A private Prometheus with the repository's rules, and the dashboard's panels asked of it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from relay.servers import free_port

ROOT = Path(__file__).parent.parent.parent
JOB = "outbox-relay"


class Prometheus:
    """Scrapes `targets` (by job: "HOST:PORT, HOST:PORT /path") each second; its data live in `directory`."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        self.port = free_port()
        rules = ROOT / "deploy/prometheus"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules / "rules.yml"), str(rules / "alerts.yml")],
            "scrape_configs": [
                {"job_name": job, "metrics_path": path, "static_configs": [{"targets": addresses.split(", ")}]}
                for job, (addresses, _, path) in ((job, target.rpartition(" ")) for job, target in targets.items())
            ],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        with (directory / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={file}",
                    f"--storage.tsdb.path={directory / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(20)

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The `data` of an answer; None while it does not answer."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def now(self, expression: str) -> list[Any]:
        """The series of an expression by now."""
        data = self.ask("query", query=expression)
        return [] if data is None else list(data["result"])

    def over(
        self, expression: str, seconds: float, step: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """(labels, [(seconds ago as a negative number, value)]) of each series."""
        end = time.time()
        data = self.ask("query_range", query=expression, start=end - seconds, end=end, step=step)
        return [
            (series["metric"], [(float(at) - end, float(value)) for at, value in series["values"]])
            for series in data["result"]
        ]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())["panels"]
    return found


def expression_of(target: Mapping[str, Any]) -> str:
    """A panel's question for this job."""
    return str(target["expr"]).replace("$job", JOB)
