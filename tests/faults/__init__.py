"""Faults on real servers, two relays under load through all of them; `python -m tests.faults` writes the table."""
