"""The pure state machine of admission: who is accepted, who runs where, what is held, and until when.

No I/O, no clock, no randomness: times and ids come in as arguments, decisions go out as values. The core
wraps it in futures and a journal; the simulation runs it under seeds.
"""
