"""The table of held keys against a dict, and what it costs."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from relay.core.held_keys import HeldKeys
from relay.core.settings import EngineSettings
from relay.message import Key

KEYS = [("t", str(n)) for n in range(12)]
STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "free"]), st.sampled_from(KEYS), st.integers(-1, 9), st.integers(0, 99)),
    max_size=40,
)

Step = tuple[str, Key, int, int]


def play(steps: list[Step]) -> tuple[HeldKeys, dict[Key, tuple[int, int]]]:
    table, model = HeldKeys(), dict[Key, tuple[int, int]]()
    for what, key, serial, seq in steps:
        if what == "hold":
            table.hold(key, serial, seq)
            before = model.get(key, (serial, seq))
            model[key] = (max(before[0], serial), max(before[1], seq))
        else:
            table.free(key)
            model.pop(key, None)
    return table, model


def content(table: HeldKeys) -> dict[Key, tuple[int, int]]:
    found = {key: hold for key in KEYS if (hold := table.get(key)) is not None}
    assert len(found) == len(table)
    return found


@given(STEPS, STEPS, st.integers(-2, 9))
def test_it_is_a_dict_of_the_higher_of_each(steps: list[Step], others: list[Step], serial: int) -> None:
    table, model = play(steps)
    assert content(table) == model
    assert table.last_serial() == max((since for since, _ in model.values()), default=-1)
    assert content(table.since(serial)) == {key: hold for key, hold in model.items() if hold[0] > serial}
    more, its_model = play(others)
    table.add(more)
    assert content(table) == {
        key: tuple(map(max, model.get(key, (-1, 0)), its_model.get(key, (-1, 0)))) for key in model | its_model
    }
    table.clear()
    assert content(table) == {}


def test_i6_all_shards_full_of_held_keys_take_a_few_megabytes() -> None:
    """A dict of keys took 400 bytes each: with 200,000 rows parked, each of another key, pages had to ask instead."""
    count = EngineSettings().held_keys_max
    tracemalloc.start()
    try:
        table = HeldKeys()
        for n in range(count):
            table.hold(("order", f"customer-{n}"), n, n)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(table) == count == 4096
    assert size < 30 * count
