"""What every process has: metrics of its own, and a garbage collector."""

import gc
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Memory, CPU time, open files and garbage collection of this process."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)


GARBAGE_OBJECTS: Final = 20_000
"""Containers made and not freed between two looks for cycles; Python's own number, 700, is one busy turn."""


def quieten_garbage_collection() -> None:
    """Call once a server is up. What the start made stays for good and is never looked through again; new
    objects die by their reference counts, and a search for cycles among hundreds of requests under way
    finds next to nothing. Cycles that there are wait a little longer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
