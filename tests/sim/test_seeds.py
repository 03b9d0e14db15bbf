"""A few hundred random histories, and that a seed is a history for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .seeds import play

CHUNK = 10
CHUNKS = 30


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_histories(chunk: int) -> None:
    """I1-I5 hold in every history; a failure prints its seed: `python -m tests.sim --seeds 1 --from SEED`."""
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        result = play(seed)
        assert result.delivered >= result.duplicates


def test_a_seed_is_the_same_history_in_every_process() -> None:
    """Hash randomisation once made a failing seed pass elsewhere: nothing may depend on the order of a set."""
    script = "from tests.sim.seeds import play; print([play(seed).log for seed in range(8)])"
    outputs = set()
    for hash_seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
