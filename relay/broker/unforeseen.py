"""What goes wrong with one row and was not thought of: that row's failure, and nobody else's.

An exception that nobody foresaw, raised while a row becomes a message, would end the relay, and its successor at the same
row, for ever. It is the row's, of class `unknown`: tried again along the ladder, then parked with the text.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from relay.errors import MessageInvalid

P = ParamSpec("P")
T = TypeVar("T")


def of_the_row(encode: Callable[P, T]) -> Callable[P, T]:
    """`encode` turns one row into bytes: whatever else than MessageInvalid it raises becomes one. A broken invariant of ours
    (AssertionError) does not: the state of more than this row may be wrong."""

    @functools.wraps(encode)
    def encode_or_blame(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return encode(*args, **kwargs)
        except (MessageInvalid, AssertionError):
            raise
        except Exception as error:
            raise MessageInvalid(_told(error), failure_class="unknown") from error

    return encode_or_blame


def _told(error: Exception) -> str:
    """`KeyError: 'x' (fields.py:88)`: the words, and where it arose, for the bug report."""
    text = "".join(traceback.format_exception_only(error)).strip()
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({place.filename.rpartition('/')[2]}:{place.lineno})"
