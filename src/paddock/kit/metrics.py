"""Prometheus metrics. Names start with `paddock_`; units are in the names."""

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
# Memory, CPU and descriptors of this process, under the standard names.
ProcessCollector(registry=REGISTRY)

LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


def counter(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
    """Declare a counter."""
    return Counter(name, documentation, labels, registry=REGISTRY)


def gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    """Declare a gauge."""
    return Gauge(name, documentation, labels, registry=REGISTRY)


def histogram(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Histogram:
    """Declare a histogram of seconds."""
    return Histogram(name, documentation, labels, registry=REGISTRY, buckets=LATENCY_BUCKETS)


def _task_count() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0  # Outside an event loop there are none.


gauge("paddock_tasks", "Tasks of the event loop: one that only grows has a leak.").set_function(
    _task_count
)


def exposition() -> bytes:
    """Return all metrics in Prometheus' text format."""
    return generate_latest(REGISTRY)
