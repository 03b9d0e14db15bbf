"""Text for people: counted nouns, tables, and words of strangers made harmless. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def many(count: int, noun: str) -> str:
    """A number and its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """On one line, and without what would command a terminal: ids, routes and a server's words are anybody's."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_json(text: str) -> str:
    """A JSON document that does not command a terminal either: it may escape any character of its strings."""
    return "".join(each if each.isprintable() or each == "\n" else _utf16_escapes(each) for each in text)


def _utf16_escapes(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def shell_words(words: Sequence[str]) -> str:
    """A command for a shell, to be read from a terminal and typed or pasted. What does not print stands as escapes in the
    quotes of bash, zsh and ksh that read them."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_shell_escape, word))}'" for word in words
    )


def _shell_escape(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    return character if character.isprintable() else "".join(f"\\x{byte:02x}" for byte in character.encode())


def cut(text: str, characters_max: int) -> str:
    """Not longer than that, and a sign that there was more."""
    return text if len(text) <= characters_max else f"{text[:characters_max]}…"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """The cells of each line below each other, made printable, two spaces apart; all lines have as many cells."""
    shown = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(cell) for cell in column) for column in zip(*shown, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in shown]


def seconds(value: float) -> str:
    """A duration that is read at a glance."""
    if value < 0.01:
        return f"{value * 1e6:.0f} µs" if value < 0.001 else f"{value * 1000:.1f} ms"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:,.0f} d"
