"""Metrics in Prometheus' form. Names start with `paddock_`; units are in the names."""

import asyncio

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

REGISTRY = CollectorRegistry(auto_describe=True)
# Memory, CPU and descriptors of this process, by the names that every dashboard knows.
ProcessCollector(registry=REGISTRY)

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
    """Declare something that only grows."""
    return Counter(name, documentation, labels, registry=REGISTRY)


def gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    """Declare something that goes up and down."""
    return Gauge(name, documentation, labels, registry=REGISTRY)


def histogram(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Histogram:
    """Declare a distribution of seconds."""
    return Histogram(name, documentation, labels, registry=REGISTRY, buckets=LATENCY_BUCKETS)


def _task_count() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0  # Asked for outside a loop: it has none.


gauge("paddock_tasks", "Tasks of the event loop: one that only grows has a leak.").set_function(
    _task_count
)


def exposition() -> bytes:
    """Render all metrics as Prometheus' text."""
    return generate_latest(REGISTRY)
