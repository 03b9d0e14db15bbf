"""Which build is running: the hot path `compiled` by mypyc, or `pure` (docs/decisions/0021-a-compiled-build.md)."""

from __future__ import annotations

from typing import Final

from relay import __version__, message

BUILD: Final = "pure" if str(message.__file__).endswith((".py", ".pyc")) else "compiled"

VERSION: Final = __version__ if BUILD == "pure" else f"{__version__} ({BUILD})"
"""As `relay --version` shows it."""
