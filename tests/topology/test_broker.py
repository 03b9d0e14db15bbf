"""`relay topology` against RabbitMQ: what it declares does what docs/topology.md says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time

import aio_pika
import pytest

from relay.management import ApiRefused
from relay.topology import names
from tests.vhost import Vhost, count, message_of, send

LADDER = """\
[[exchange]]
name = "orders"

[[queue]]
name = "orders.inventory"
bind = [{ exchange = "orders", key = "order.*" }]
retry = ["300ms"]
delivery_limit = 2

[[queue]]
name = "orders.audit"
bind = [{ exchange = "orders", key = "#" }]
"""

RETRY = "orders.inventory.retry.300ms"


async def test_a_retried_message_comes_back_after_its_delay_and_only_there(broker: Vhost) -> None:
    await broker.apply(LADDER)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        began = time.monotonic()
        await send(channel, "", names.retry_queue("orders.inventory", 0.3), "m1", headers={names.RETRY_ATTEMPT: 1})
        message = await message_of(channel, "orders.inventory")
        assert time.monotonic() - began >= 0.3
        assert (message.message_id, message.routing_key) == ("m1", "orders.inventory")
        assert message.headers[names.RETRY_ATTEMPT] == 1
        # `orders.audit` is bound to everything of the work exchange, and this was none of its messages.
        assert await count(channel, "orders.audit") == 0
        assert await count(channel, RETRY) == 0


async def kill_consumers(broker: Vhost, times: int) -> None:
    """So many consumers of the queue end with its message in hand. RabbitMQ 4.3 does not count a nack as a failure."""
    for _ in range(times):
        async with await aio_pika.connect(broker.url) as connection:
            await message_of(await connection.channel(), "orders.inventory")


async def test_what_kills_its_consumer_again_and_again_is_parked(broker: Vhost) -> None:
    """The delivery limit's dead letter goes by the dead letter exchange to the parking queue of this queue."""
    await broker.apply(LADDER)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await send(channel, "orders", "order.paid", "poison")
        await kill_consumers(broker, times=3)
        parked = await message_of(channel, "orders.inventory.parking")
        assert parked.message_id == "poison"
        assert await count(channel, "orders.inventory") == 0
        assert await count(channel, "orders.audit.parking") == 0


async def test_a_plain_reject_is_parked(broker: Vhost) -> None:
    await broker.apply(LADDER)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await send(channel, "orders", "order.paid", "bad")
        await (await message_of(channel, "orders.inventory")).reject(requeue=False)
        assert (await message_of(channel, "orders.inventory.parking")).message_id == "bad"


async def test_what_was_parked_can_be_retried_again(broker: Vhost) -> None:
    """With its old `x-death` RabbitMQ 3.10 takes it for an automatic cycle and drops it as it expires: copies leave that
    out."""
    await broker.apply(LADDER)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await send(channel, "orders", "order.paid", "poison")
        await kill_consumers(broker, times=3)
        parked = await message_of(channel, "orders.inventory.parking")
        kept = {name: value for name, value in parked.headers.items() if not names.is_brokers_own(name)}
        assert "x-death" in parked.headers
        await send(channel, "", RETRY, "poison", headers=kept)
        assert (await message_of(channel, "orders.inventory")).message_id == "poison"


async def test_a_full_parking_queue_refuses(broker: Vhost) -> None:
    """Who parks gets a nack and keeps the message; nothing is dropped."""
    await broker.apply(LADDER.replace("delivery_limit = 2", "parking = { max_length = 1 }"))
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        refused = 0
        for number in range(8):
            try:
                await send(channel, "orders.dlx", "orders.inventory.parking", f"p{number}")
            except aio_pika.exceptions.DeliveryError:
                refused += 1
        assert refused > 0
        assert await count(channel, "orders.inventory.parking") == 8 - refused


async def test_shards_keep_a_key_together(broker: Vhost) -> None:
    await broker.apply(
        '[[exchange]]\nname = "orders"\n[[queue]]\nname = "inv"\nshards = 4\nsingle_active_consumer = false\n'
        'bind = [{ exchange = "orders", key = "order.*" }]\n'
    )
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        for number in range(60):
            headers = {"aggregate_id": f"key-{number % 12}"}
            await send(channel, "orders", "order.paid", f"m{number}", headers=headers)
        keys: list[set[str]] = []
        for shard in range(4):
            queue = await channel.get_queue(names.shard_queue("inv", shard), ensure=False)
            found: set[str] = set()
            while (message := await queue.get(no_ack=True, fail=False)) is not None:
                found.add(str(message.headers["aggregate_id"]))
            keys.append(found)
        assert sum(map(len, keys)) == 12 == len(set.union(*keys))
        assert sum(bool(found) for found in keys) > 1


async def test_a_second_consumer_of_a_shard_waits(broker: Vhost) -> None:
    await broker.apply('[[queue]]\nname = "inv"\nshards = 2\ndead_letter = "inv.dlx"\n')
    async with await aio_pika.connect(broker.url) as connection:
        first, second = await connection.channel(), await connection.channel()
        got: asyncio.Queue[str] = asyncio.Queue()

        async def consume(channel: aio_pika.abc.AbstractChannel, name: str) -> None:
            async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
                await message.ack()
                await got.put(name)

            await (await channel.get_queue("inv.0", ensure=False)).consume(take)

        await consume(first, "first")
        await consume(second, "second")
        for number in range(10):
            await send(first, "", "inv.0", f"m{number}")
        assert {await asyncio.wait_for(got.get(), 10) for _ in range(10)} == {"first"}


async def test_a_queue_of_other_arguments_is_reported_and_left_alone(broker: Vhost) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("orders.inventory", durable=True, arguments={"x-message-ttl": 90_000})
        await send(channel, "", "orders.inventory", "precious")
        path = broker.write(LADDER)
        done = await broker.relay("topology", "apply", path)
        assert done.returncode == 4
        assert "! queue" in done.stdout
        assert "x-message-ttl 90000 instead of none, x-queue-type classic instead of quorum" in done.stdout
        assert "delete this queue yourself" in done.stdout
        assert await count(channel, "orders.inventory") == 1
        # Everything else is there, but for the policy that would have acted on it.
        assert await count(channel, "orders.audit") == 0
        assert broker.api.get("policies", broker.vhost, "topology.orders.audit") is not None
        assert broker.api.get("policies", broker.vhost, "topology.orders.inventory") is None
        assert (await broker.relay("topology", "check", path)).returncode == 4


async def test_check_finds_drift_and_apply_mends_it(broker: Vhost) -> None:
    path = await broker.apply(LADDER)
    assert (await broker.relay("topology", "check", path)).returncode == 0
    policy = broker.api.get("policies", broker.vhost, "topology.orders.inventory")
    changed = {**policy, "definition": {**policy["definition"], "delivery-limit": 7}}
    broker.api.put("policies", broker.vhost, "topology.orders.inventory", document=changed)
    done = await broker.relay("topology", "check", path, "--json")
    assert done.returncode == 4
    document = json.loads(done.stdout)
    (change,) = document["changes"]
    assert (document["differs"], change["action"], change["detail"]) == (
        True,
        "update",
        "delivery-limit 7 instead of 2",
    )
    assert (await broker.relay("topology", "apply", path)).returncode == 0
    assert (await broker.relay("topology", "check", path)).returncode == 0


async def test_parkings_user_reads_parking_and_nothing_else(broker: Vhost) -> None:
    text = LADDER + '\n[queue.parking]\nuser = "support"\n'
    path = broker.write(text)
    done = await broker.relay("topology", "apply", path)
    assert done.returncode == 4
    assert "there is no such user" in done.stdout
    assert "rabbitmqctl add_user support" in done.stdout
    broker.api.put("users", "support", document={"password": "support", "tags": ""})
    try:
        await broker.apply(text)
        url = broker.url.replace("guest:guest", "support:support")
        async with await aio_pika.connect(url) as connection:
            channel = await connection.channel()
            assert await count(channel, "orders.audit.parking") == 0
            await send(channel, "orders", "order.paid", "redriven")
            assert await (await channel.get_queue("orders.audit.parking", ensure=False)).get(fail=False) is None
            with pytest.raises(aio_pika.exceptions.ChannelClosed, match=r"access to queue 'orders.audit'"):
                await (await channel.get_queue("orders.audit", ensure=False)).get(fail=False)
    finally:
        broker.server.ctl("delete_user", "support")


async def test_a_policymaker_applies_a_topology(broker: Vhost) -> None:
    """Who may not look at the vhost itself; no administrator is needed where no permissions are granted."""
    name = "maker"
    broker.api.put("users", name, document={"password": "maker", "tags": "policymaker"})
    try:
        broker.api.put("permissions", broker.vhost, name, document={"configure": ".*", "write": ".*", "read": ".*"})
        path = broker.write(LADDER)
        settings = {"RELAY_MANAGEMENT_URL": broker.server.management_url.replace("guest:guest", f"{name}:maker")}
        done = await broker.relay("topology", "apply", path, settings=settings)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        done = await broker.relay("topology", "check", path, settings=settings)
        assert (done.returncode, done.stdout) == (0, f"vhost {broker.vhost}: as described\n")
    finally:
        broker.server.ctl("delete_user", name)


async def test_a_consumers_least_rights(broker: Vhost) -> None:
    """As docs/topology.md has them: consume, retry, park, and nothing else."""
    await broker.apply(LADDER)
    broker.api.put("users", "consumer", document={"password": "consumer", "tags": ""})
    try:
        rights = {"configure": "^$", "write": r"^(amq\.default|orders\.dlx)$", "read": r"^orders\.inventory$"}
        broker.api.put("permissions", broker.vhost, "consumer", document=rights)
        async with (
            await aio_pika.connect(broker.url) as connection,
            await aio_pika.connect(broker.url.replace("guest:guest", "consumer:consumer")) as theirs,
        ):
            channel = await theirs.channel()
            await send(await connection.channel(), "orders", "order.paid", "m")
            await (await message_of(channel, "orders.inventory")).ack()
            await send(channel, "", RETRY, "m")
            assert (await message_of(channel, "orders.inventory")).message_id == "m"
            await send(channel, "orders.dlx", "orders.inventory.parking", "m")
            with pytest.raises(aio_pika.exceptions.ChannelClosed, match="access to exchange 'orders'"):
                await send(channel, "orders", "order.paid", "m")
    finally:
        broker.server.ctl("delete_user", "consumer")


async def test_the_printed_commands_do_the_same(broker: Vhost) -> None:
    path = broker.write(LADDER.partition('[[queue]]\nname = "orders.audit"')[0])
    plan = await broker.relay("topology", "plan", path, settings={})
    assert (plan.returncode, plan.stderr) == (0, "")
    script = f'rabbitmqctl() {{ "{broker.server.ctl_path}" --quiet "$@"; }}\nset -e\n{plan.stdout}'
    await asyncio.to_thread(
        lambda: subprocess.run(
            ["bash", "-c", script], cwd=broker.directory, env=broker.server.environment, check=True, capture_output=True
        )
    )
    done = await broker.relay("topology", "check", path)
    assert (done.returncode, done.stdout) == (0, f"vhost {broker.vhost}: as described\n")


async def test_a_password_that_is_a_word_spoils_no_command(broker: Vhost) -> None:
    """The password of the management URL is `guest`."""
    path = broker.write(LADDER.replace("inventory", "guest"))
    for arguments in ((), ("--json",)):
        done = await broker.relay("topology", "plan", path, *arguments)
        assert (done.returncode, "topology.orders.guest" in done.stdout, "***" in done.stdout) == (4, True, False)


async def test_without_the_api_apply_and_check_say_what_they_need(broker: Vhost) -> None:
    path = broker.write(LADDER)
    for action in ("apply", "check"):
        done = await broker.relay("topology", action, path, settings={})
        assert done.returncode == 2
        assert "RELAY_MANAGEMENT_URL: not set" in done.stderr


async def test_a_wrong_file_a_wrong_vhost_a_wrong_password(broker: Vhost) -> None:
    faulty = await broker.relay("topology", "plan", broker.write('[[queue]]\nnam = "q"\n'))
    assert faulty.returncode == 2
    assert "topology.toml:3: unknown key 'nam' in [[queue]]; nearest: name" in faulty.stderr
    assert (await broker.relay("topology", "plan", "/nowhere.toml")).returncode == 2
    path = broker.write(LADDER)
    elsewhere = await broker.relay("topology", "check", path, "--vhost", "nowhere")
    assert elsewhere.returncode == 4
    assert "rabbitmqctl add_vhost nowhere" in elsewhere.stdout
    unnamed = await broker.relay("topology", "check", path, "--vhost", "")
    assert (unnamed.returncode, unnamed.stderr) == (2, "relay: --vhost '': empty; allowed: a vhost's name\n")
    settings = {"RELAY_MANAGEMENT_URL": broker.server.management_url.replace(":guest@", ":s3cretword@")}
    refused = await broker.relay("topology", "check", path, settings=settings)
    assert refused.returncode == 1
    assert "answered 401" in refused.stderr
    assert "s3cretword" not in refused.stderr + refused.stdout
    with pytest.raises(ApiRefused):
        broker.api.put("queues", broker.vhost, "amq.no", document={"durable": True})


BILLING = """\
[[exchange]]
name = "orders"

[[queue]]
name = "billing"
bind = [{ exchange = "orders", key = "#" }]
"""


async def test_shards_that_are_given_up_are_reported_and_keep_their_way_out(broker: Vhost) -> None:
    """Each message was copied to the old shards in silence, and what waited there lost its policy."""
    await broker.apply(f"{BILLING}shards = 2\nsingle_active_consumer = false\n")
    path = broker.write(BILLING)
    done = await broker.relay("topology", "apply", path)
    assert done.returncode == 4
    conflict = "! binding orders -> billing.shards '#', which the file does not have: messages still go there"
    assert conflict in " ".join(done.stdout.split()), done.stdout
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await send(channel, "", "billing.1", "old")
        await (await message_of(channel, "billing.1")).reject(requeue=False)
        assert (await message_of(channel, "billing.parking")).message_id == "old"
        hashing = await channel.get_exchange("billing.shards", ensure=False)
        await hashing.unbind("orders", "#")
        checked = await broker.relay("topology", "check", path)
        assert (checked.returncode, checked.stdout.count("? queue")) == (0, 2), checked.stdout
        for shard in ("billing.0", "billing.1"):
            await channel.queue_delete(shard)
        assert "~ policy" in (await broker.relay("topology", "apply", path)).stdout
        assert (await broker.relay("topology", "check", path)).returncode == 0
