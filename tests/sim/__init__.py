"""The deterministic simulation: the real runner and core over fakes, in virtual time, from one seed."""
