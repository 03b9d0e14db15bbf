"""What the programs under measurement see of this process's environment."""

from __future__ import annotations

import os


def relay_environment(**settings: str) -> dict[str, str]:
    """This process's environment without any `RELAY_*` of the caller's: a benchmark measures what it says it does."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    return inherited | settings
