"""The dashboard and the rules: they are valid, name metrics that exist, and every alert has a test and a runbook entry."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relay.inbox.metrics import METRICS as INBOX_METRICS
from relay.metrics import METRICS, Kind

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/dashboard.json"

OTHERS = {
    "up",
    # prometheus-client's own.
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    # RabbitMQ's, as rabbitmq_prometheus of 3.10 names them (tests/deploy/test_broker_metrics.py asks it).
    "rabbitmq_queue_messages_ready",
    "rabbitmq_global_messages_dead_lettered_rejected_total",
    "rabbitmq_global_messages_dead_lettered_expired_total",
    "rabbitmq_global_messages_dead_lettered_delivery_limit_total",
    "rabbitmq_global_messages_dead_lettered_confirmed_total",
}

ALL_METRICS = (*METRICS, *INBOX_METRICS)
TABLE_GAUGES = ("backlog_rows", "oldest_pending_age_seconds", "deferred_rows", "parked_rows", "held_keys", "newest_seq")
INBOX_GAUGES = (
    "inbox_pending_rows",
    "inbox_oldest_pending_age_seconds",
    "inbox_oldest_due_age_seconds",
    "inbox_parked_rows",
)

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def rules(file: str) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load((PROMETHEUS / file).read_text())["groups"]:
        yield from group["rules"]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything that is asked."""
    for file in ("rules.yml", "alerts.yml"):
        for rule in rules(file):
            yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def known_metrics() -> set[str]:
    names = set(OTHERS) | {rule["record"] for rule in rules("rules.yml")}
    for metric in ALL_METRICS:
        names.add(metric.name)
        if metric.kind is Kind.HISTOGRAM:
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def test_everything_that_is_asked_exists() -> None:
    known = known_metrics()
    for where, text in expressions():
        names = set(re.findall(r"\b(?:(?:outbox|inbox):\w+:\w+|(?:relay|rabbitmq|process)_\w+)", text))
        assert names, where
        assert names <= known, (where, names - known)


def test_label_values_that_are_asked_for_exist() -> None:
    """An alert on a reason that is spelt otherwise never fires."""
    values = {metric.name: (metric.label, metric.values) for metric in ALL_METRICS}
    for where, text in expressions():
        for name, label, value in re.findall(r"\b(relay_\w+)\{(\w+)=\"(\w+)\"", text):
            assert values[name][0] == label, where
            assert value in values[name][1], where


def test_the_tables_gauges_take_max_and_are_never_summed() -> None:
    """Every relay exports the same ones; of an inbox, the one sidecar that writes."""
    for where, text in expressions():
        for name in (*TABLE_GAUGES, *INBOX_GAUGES):
            for outer in re.findall(rf"(\w+) without \([^)]*\) \((?:clamp_min\(deriv\()?relay_{name}\b", text):
                assert outer == "max", where
            assert not re.search(rf"sum[^)]*\([^)]*relay_{name}\b", text), where


def test_nothing_holds_the_databases_clock_against_prometheus() -> None:
    """A database an hour ahead hid every stall, one an hour behind made each relay stalled."""
    timed = {metric.name for metric in METRICS if "clock" in metric.help}
    assert timed == {metric.name for metric in METRICS if metric.name.endswith("timestamp_seconds")}
    for where, text in expressions():
        assert "time()" not in text or not any(name in text for name in timed), where


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as forges make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_alert_has_a_runbook_entry() -> None:
    for rule in rules("alerts.yml"):
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor in anchors(ROOT / page), rule["alert"]
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


def test_every_alert_is_tested_on_its_fault_and_on_what_looks_like_it() -> None:
    fires: set[str] = set()
    is_silent: set[str] = set()
    for case in yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]:
        for test in case["alert_rule_test"]:
            (fires if test["exp_alerts"] else is_silent).add(test["alertname"])
    alerts = {rule["alert"] for rule in rules("alerts.yml")}
    assert fires == alerts
    assert is_silent == alerts


@needs_promtool
@pytest.mark.parametrize("arguments", ["check rules rules.yml alerts.yml", "test rules rules.test.yml alerts.test.yml"])
def test_promtool(arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_dashboards_expressions_parse(tmp_path: Path) -> None:
    """As rules, which promtool reads; the dashboard's variable has a value."""
    asked = [target["expr"].replace("$job", "outbox") for panel in panels() for target in panel["targets"]]
    group = {"name": "dashboard", "rules": [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(asked)]}
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [group]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_whole() -> None:
    """Distinct ids, no panel over another, and each with a unit that Grafana knows."""
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "s", "ops", "bytes", "percentunit"}
