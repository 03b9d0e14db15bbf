"""The dashboard's panels, drawn from real metrics: `python -m tests.deploy.dashboard_picture docs/dashboard.png`.

Four minutes of private servers, two relays and a Prometheus: traffic, a blocked broker, rows without a route. Grafana is
not asked: the panels' own questions are, and matplotlib draws the answers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aio_pika
import asyncpg
import matplotlib as mpl

from relay import migrate
from relay.servers import PostgresServer, RabbitServer
from tests.deploy.prometheus import JOB, Prometheus, expression_of, panels
from tests.e2e.conftest import Daemon

SECONDS = 240
ROWS_A_SECOND = 300

mpl.use("Agg")


async def story(url: str, rabbit: RabbitServer, seconds: float) -> None:
    """Writers at a steady pace; after a third of the time the broker blocks for half a minute; some rows have no route."""
    database = await asyncpg.connect(url)
    began = time.monotonic()
    is_blocked = was_blocked = False
    count = 0
    while (passed := time.monotonic() - began) < seconds:
        await database.execute(
            "INSERT INTO outbox (event_type, aggregate_type, aggregate_id, payload)"
            " SELECT 'ok.x', 'order', ($1::int + n) % 500, json_build_object('n', n) FROM generate_series(1, $2::int) n",
            count, ROWS_A_SECOND // 2,
        )  # fmt: skip
        count += ROWS_A_SECOND // 2
        if count % (ROWS_A_SECOND * 20) == 0:
            await database.execute("INSERT INTO outbox (event_type, aggregate_id) VALUES ('nope.x', 'k')")
        if not was_blocked and passed > seconds / 3:
            await asyncio.to_thread(rabbit.memory_alarm, True)
            is_blocked = was_blocked = True
        if is_blocked and passed > seconds / 3 + 30:
            await asyncio.to_thread(rabbit.memory_alarm, False)
            is_blocked = False
        await asyncio.sleep(0.5)
    await database.close()


async def declare(url: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue("q", durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, "ok.#")


def draw(prometheus: Prometheus, seconds: float, file: Path) -> None:
    """All curves; single numbers are their last values."""
    import matplotlib.pyplot as plt

    curves = [panel for panel in panels() if panel["type"] == "timeseries"]
    columns = 3
    figure, axes = plt.subplots(-(-len(curves) // columns), columns, figsize=(18, 20), constrained_layout=True)
    for axis, panel in zip(axes.flat, curves, strict=False):
        _panel(axis, panel, prometheus, seconds)
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    figure.suptitle(
        f"The dashboard's panels over {seconds:.0f} s: two relays, {ROWS_A_SECOND} rows/s, a blocked broker"
    )
    figure.savefig(file, dpi=60)


def _panel(axis: Any, panel: dict[str, Any], prometheus: Prometheus, seconds: float) -> None:
    axis.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=10, loc="left")
    axis.grid(alpha=0.3)
    for target in panel["targets"]:
        for labels, points in prometheus.over(expression_of(target), seconds, 2.0):
            legend = target["legendFormat"]
            for name, value in labels.items():
                legend = legend.replace("{{" + name + "}}", value)
            legend = legend.replace("{{job}}", "").strip()
            if panel["title"] == "What publishing waits for" and not any(value for _, value in points):
                continue
            axis.plot([at for at, _ in points], [value for _, value in points], label=legend, linewidth=1.2)
    if axis.lines:
        axis.legend(fontsize=7, loc="upper left")
    axis.set_ylim(bottom=0)


def main(file: Path, seconds: float = SECONDS) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="relay-picture-") as name,
        PostgresServer.start(durable=False) as postgres,
        RabbitServer.start() as rabbit,
    ):
        directory = Path(name)
        asyncio.run(migrate.run(postgres.url()))
        asyncio.run(declare(rabbit.amqp_url()))
        settings = {
            "RELAY_DATABASE_URL": postgres.url(),
            "RELAY_AMQP_URL": rabbit.amqp_url(),
            "RELAY_RETRY_DELAYS": "2s,5s",
        }
        relays = [Daemon({**settings, "RELAY_NAME": f"r{n}"}, directory / f"{n}.log") for n in range(2)]
        try:
            targets = ", ".join(f"127.0.0.1:{relay.port}" for relay in relays)
            with Prometheus(directory, {JOB: f"{targets} /metrics"}) as prometheus:
                asyncio.run(story(postgres.url(), rabbit, seconds))
                draw(prometheus, seconds, file)
        finally:
            for relay in relays:
                relay.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
