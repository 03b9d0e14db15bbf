"""What a link makes of the broker's single frames, chosen by the case: the same on the AMQP adapter and on the simulation's fake.

A real broker decides by itself which tags it confirms together; here each order of them can be had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from relay.core.ports.broker import Closed, Link

from .recorder import Recorder, make_row, make_rows


class Speaker(Protocol):
    """A broker that confirms nothing by itself; it speaks to the link that was connected last."""

    async def connect(self, recorder: Recorder) -> Link: ...

    async def published(self, count: int) -> None:
        """Wait until so many messages of this link have come."""
        ...

    def ack(self, tag: int, *, multiple: bool = False) -> None: ...
    def nack(self, tag: int, *, multiple: bool = False) -> None: ...
    def give_back(self, message_id: str) -> None: ...
    def cut(self) -> None: ...
    def refuse(self, *, alone: bool) -> None:
        """Close the channel, or the connection (`alone`), with 403 and a text that names nobody."""
        ...


Case = Callable[[Speaker], Awaitable[None]]
TAGS: list[Case] = []


def tag(function: Case) -> Case:
    TAGS.append(function)
    return function


async def in_flight(speaker: Speaker, count: int) -> tuple[Recorder, Link]:
    """A link with rows 1 to `count` in flight, under the tags 1 to `count`."""
    recorder = Recorder()
    link = await speaker.connect(recorder)
    assert link.publish(make_rows(count)).taken == count
    await speaker.published(count)
    return recorder, link


async def closed(recorder: Recorder, link: Link, why: Closed) -> None:
    await recorder.until(lambda: recorder.closed)
    assert recorder.closed is not None
    assert recorder.closed[0] is why
    assert link.in_flight == 0
    await link.close()


@tag
async def single_acks_in_any_order(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 4)
    for number, tag in enumerate((3, 1, 4, 2), 1):
        speaker.ack(tag)
        await recorder.outcomes_of(number)
        assert link.in_flight == 4 - number
        assert not link.is_in_flight(f"id-{tag}")
    assert recorder.outcomes["acked"] == [3, 1, 4, 2]
    await link.close()


@tag
async def multiple_covers_what_is_left_below_it(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 6)
    speaker.ack(2)
    speaker.ack(4, multiple=True)
    await recorder.outcomes_of(4)
    assert recorder.outcomes["acked"] == [2, 1, 3, 4]
    assert [link.is_in_flight(f"id-{seq}") for seq in (4, 5, 6)] == [False, True, True]
    speaker.nack(0, multiple=True)
    assert (await recorder.outcomes_of(6))["nacked"] == [5, 6], "tag 0 with `multiple` is all so far"
    await link.close()


@tag
async def a_nack_stays_a_nack_under_the_ack_that_covers_it(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 4)
    speaker.nack(2)
    speaker.ack(3, multiple=True)
    await recorder.outcomes_of(3)
    assert (recorder.outcomes["nacked"], recorder.outcomes["acked"]) == ([2], [1, 3])
    assert link.in_flight == 1
    speaker.ack(4)
    await recorder.outcomes_of(4)
    await link.close()


@tag
async def a_return_is_tied_to_its_row_by_the_message_id(speaker: Speaker) -> None:
    """It waits for its confirm, alone or under a covering one, and turns an ack or a nack into a return."""
    recorder, link = await in_flight(speaker, 6)
    speaker.give_back("id-2")
    speaker.give_back("id-5")
    speaker.ack(1)
    await recorder.outcomes_of(1)
    assert link.is_in_flight("id-2")
    speaker.ack(3, multiple=True)
    await recorder.outcomes_of(3)
    assert (recorder.outcomes["acked"], recorder.outcomes["returned"]) == ([1, 3], [2])
    speaker.nack(6, multiple=True)
    await recorder.outcomes_of(6)
    assert (recorder.outcomes["nacked"], recorder.outcomes["returned"]) == ([4, 6], [2, 5])
    assert {each.error for each in recorder.returned} == {"312 NO_ROUTE"}
    await link.close()


@tag
async def kinds_are_told_in_the_brokers_order(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 4)
    speaker.ack(1)
    speaker.nack(2)
    speaker.give_back("id-3")
    speaker.ack(3)
    speaker.ack(4)
    await recorder.outcomes_of(4)
    assert recorder.events == [("acked", [1]), ("nacked", [2]), ("returned", [3]), ("acked", [4])]
    await link.close()


@tag
async def a_tag_confirmed_twice_ends_the_link(speaker: Speaker) -> None:
    """Nothing that such a broker says is believed: the row was told of once, the others are lost."""
    recorder, link = await in_flight(speaker, 3)
    speaker.ack(2)
    await recorder.outcomes_of(1)
    speaker.ack(2)
    await closed(recorder, link, Closed.CONNECTION)
    assert recorder.events == [("acked", [2]), ("closed", [1, 3])]


@tag
async def a_nack_behind_the_ack_of_its_tag_ends_the_link(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 3)
    speaker.ack(2, multiple=True)
    speaker.nack(1)
    await closed(recorder, link, Closed.CONNECTION)
    assert recorder.events == [("acked", [1, 2]), ("closed", [3])]


@tag
async def a_tag_that_was_never_given_ends_the_link(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 3)
    speaker.ack(7, multiple=True)
    await closed(recorder, link, Closed.CONNECTION)
    assert recorder.events == [("closed", [1, 2, 3])]


@tag
async def what_was_confirmed_before_a_cut_counts(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 6)
    speaker.ack(3, multiple=True)
    speaker.ack(5)
    await recorder.outcomes_of(4)
    speaker.cut()
    await closed(recorder, link, Closed.CONNECTION)
    assert recorder.events[-1] == ("closed", [4, 6])
    assert sorted(recorder.outcomes["acked"]) == [1, 2, 3, 5]


@tag
async def a_return_without_its_confirm_is_lost_with_the_link(speaker: Speaker) -> None:
    recorder, link = await in_flight(speaker, 3)
    speaker.give_back("id-2")
    speaker.ack(1)
    await recorder.outcomes_of(1)
    speaker.cut()
    await closed(recorder, link, Closed.CONNECTION)
    assert recorder.outcomes == {"acked": [1], "nacked": [], "returned": [], "lost": [2, 3]}


@tag
async def tags_begin_anew_with_each_link(speaker: Speaker) -> None:
    first, link = await in_flight(speaker, 3)
    speaker.cut()
    await closed(first, link, Closed.CONNECTION)
    second = Recorder()
    link = await speaker.connect(second)
    link.publish([make_row(3), make_row(1)])
    await speaker.published(2)
    speaker.ack(1)
    assert (await second.outcomes_of(1))["acked"] == [3]
    speaker.ack(2)
    assert (await second.outcomes_of(2))["acked"] == [3, 1]
    assert first.outcomes["lost"] == [1, 2, 3]
    await link.close()


@tag
async def a_refusal_that_names_nobody_leaves_all_in_flight_suspects(speaker: Speaker) -> None:
    for alone in (False, True):
        recorder, link = await in_flight(speaker, 5)
        speaker.ack(2, multiple=True)
        await recorder.outcomes_of(2)
        speaker.refuse(alone=alone)
        await closed(recorder, link, Closed.REFUSED)
        assert recorder.events == [("acked", [1, 2]), ("suspected", [3, 4, 5]), ("closed", [])]
        assert recorder.is_alone is alone


@tag
async def a_refusal_with_one_row_in_flight_blames_it(speaker: Speaker) -> None:
    for alone in (False, True):
        recorder, link = await in_flight(speaker, 2)
        speaker.ack(1)
        await recorder.outcomes_of(1)
        speaker.refuse(alone=alone)
        await closed(recorder, link, Closed.REFUSED)
        assert recorder.events == [("acked", [1]), ("refused", [2]), ("closed", [])]
        assert recorder.refusals[0].reason == "refused"
