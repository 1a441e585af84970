"""Which computed tokens serve which prompt: pure rules of the prefix and session cache of one worker.

No I/O, no clock, no randomness. The engine loop carries out what is decided here.
"""
