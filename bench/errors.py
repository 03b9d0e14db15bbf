"""What ends a measurement."""

from __future__ import annotations


class BenchFailed(Exception):
    """A run that proves nothing: a row is missing, a server complained, something did not end. It reports no figure."""


class Unavailable(Exception):
    """A program that a step needs is not installed; the text says what to install. The other steps run."""
