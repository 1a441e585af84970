"""Metrics every process has."""

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Memory, CPU time, open files and garbage collection of this process."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
