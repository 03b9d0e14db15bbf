"""Hours at half the ceiling with random faults: whether anything grows, and whether anything is lost."""
