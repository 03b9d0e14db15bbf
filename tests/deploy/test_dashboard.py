"""The dashboard and the rules on a real Prometheus that scrapes a real relay."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import eventually
from tests.deploy.prometheus import JOB, Prometheus, expression_of, panels
from tests.e2e.conftest import Site
from tests.e2e.conftest import site as site  # a fixture

MAY_BE_EMPTY = {
    "Rows that failed": "nothing failed",
    "Messages parked at the broker": "no broker is scraped",
}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
async def test_every_panel_and_rule_has_an_answer(site: Site) -> None:
    """A label that is spelt otherwise than the relay spells it shows as an empty panel, and as an alert that never fires."""
    relay = await site.start().ready()
    await site.insert_many(200, 20)
    await site.all_sent()
    with Prometheus(site.directory, {JOB: f"127.0.0.1:{relay.port} /metrics"}) as prometheus:
        await eventually(lambda: prometheus.now("outbox:relay_rows_sent:rate5m"), 30.0, interval_s=0.2)
        await site.insert_many(200, 20, prefix="n")
        await site.all_sent()
        await eventually(lambda: prometheus.now("outbox:relay_delivery_seconds:p99_5m >= 0"), 30.0, interval_s=0.2)

        def empty() -> list[str]:
            """Titles of panels that have nothing to show, and should."""
            found = [panel for panel in panels() if panel["title"] not in MAY_BE_EMPTY]
            return [
                panel["title"]
                for panel in found
                if not any(prometheus.now(expression_of(target)) for target in panel["targets"])
            ]

        await eventually(lambda: not empty(), 30.0, interval_s=0.5)
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 25
        assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
        assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
        await relay.stop()
        await eventually(
            lambda: any(rule.get("state") == "pending" for rule in _named(prometheus, "OutboxRelayAbsent")),
            30.0,
            interval_s=0.5,
        )


def _named(prometheus: Prometheus, name: str) -> list[dict[str, object]]:
    groups = prometheus.ask("rules")["groups"]
    return [rule for group in groups for rule in group["rules"] if rule["name"] == name]
