"""Nonsense from outside: configuration, rows, the broker's bytes. The answer is a documented error or state, never a
traceback, never a hang."""
