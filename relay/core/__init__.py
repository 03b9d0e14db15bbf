"""Decisions only: nothing here waits, opens, reads a clock or draws a random number."""
