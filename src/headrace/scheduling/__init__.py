"""Pure scheduling policy: no I/O, no clock, no randomness."""
