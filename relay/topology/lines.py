"""Where in a TOML text a key stands: what `tomllib` does not tell, and an error needs.

Reads headers and keys line by line, as a person looks for them; what stands inside an inline table is searched from its
key on. A place that is not found is its nearest known parent's: an error names a line that helps, never none.
"""

from __future__ import annotations

import re
from typing import Final

Path = tuple[str | int, ...]
"""From the top: names of tables and keys, and indexes in arrays."""

_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_HEADER: Final = re.compile(rf"\s*(\[\[?)\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]\]?")
_PAIR: Final = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")
_NAME: Final = re.compile(_KEY)
_LONG_STRINGS: Final = ('"""', "'''")


class Lines:
    """The lines of one text, counted from 1."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._places: dict[Path, int] = {(): 1}
        self._scan()

    def of(self, path: Path) -> int:
        """The line of a key or table, or of its nearest known parent."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._places:
                line = self._places[path[:end]]
                return self._within(line, path[end:]) if end else line
        raise AssertionError("the empty path is known")

    def _scan(self) -> None:
        here: Path = ()
        arrays: dict[Path, int] = {}
        closing: str | None = None
        for number, line in enumerate(self._lines, 1):
            if closing is not None:
                closing = None if closing in line else closing
                continue
            if (header := _HEADER.match(line)) is not None:
                here = self._table(_names(header[2]), header[1] == "[[", arrays)
                self._places.setdefault(here, number)
                if here and isinstance(here[-1], int):
                    self._places.setdefault(here[:-1], number)
            elif (pair := _PAIR.match(line)) is not None:
                self._places.setdefault((*here, *_names(pair[1])), number)
            closing = next((quotes for quotes in _LONG_STRINGS if line.count(quotes) % 2), None)

    def _table(self, names: list[str], is_array: bool, arrays: dict[Path, int]) -> Path:
        """The path of a header; a name on the way that is an array of tables means its last one."""
        path: Path = ()
        for place, name in enumerate(names):
            path = (*path, name)
            if is_array and place == len(names) - 1:
                arrays[path] = arrays.get(path, -1) + 1
            if path in arrays:
                path = (*path, arrays[path])
        return path

    def _within(self, line: int, rest: Path) -> int:
        """Further on from `line`: the n-th brace for an index, the name before an equals sign for a key."""
        later = [place for place in self._places.values() if place > line]
        end = min(later, default=len(self._lines) + 1)
        text, at = "\n".join(self._lines[line - 1 : end - 1]), 0
        for part in rest:
            if isinstance(part, int):
                found = [match.start() for match in re.finditer(r"\{", text[at:])]
                at += found[part] if part < len(found) else 0
            elif (match := re.search(rf"""(?<![\w-])["']?{re.escape(part)}["']?\s*=""", text[at:])) is not None:
                at += match.start()
        return line + text.count("\n", 0, at)


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in _NAME.findall(dotted)]
