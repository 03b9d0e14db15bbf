"""Measurements of the relay against the broker's own ceiling, on private servers. `python -m bench --help`."""
