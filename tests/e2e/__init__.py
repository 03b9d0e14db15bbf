"""End to end: the installed command against real servers."""
