"""Metrics of the node, which has no HTTP endpoint of its own: asked over its socket at intervals.

They are those of its queue of heavy work (`runtime/local/node/heavy_work.py`), by kind.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from paddock.kit import metrics
from paddock.kit.errors import PaddockError
from paddock.kit.logs import fields
from paddock.runtime.local.node.heavy_work import WAIT_BUCKETS, WorkReport

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0


class HeavyWorkSource(Protocol):
    """A runtime whose node has a queue of heavy work."""

    async def heavy_work(self) -> tuple[WorkReport, ...]: ...


class NodeMetrics(Collector):
    """The last reports of the node, as Prometheus metrics."""

    def __init__(self) -> None:
        self._reports: tuple[WorkReport, ...] = ()

    def collect(self) -> Iterator[GaugeMetricFamily | HistogramMetricFamily]:
        """Return the metrics."""
        waiting = GaugeMetricFamily(
            "paddock_heavy_work_waiting", "Operations that wait for their turn.", labels=("kind",)
        )
        running = GaugeMetricFamily(
            "paddock_heavy_work_running", "Operations under way.", labels=("kind",)
        )
        waited = HistogramMetricFamily(
            "paddock_heavy_work_wait_seconds", "From request to start.", labels=("kind",)
        )
        for report in self._reports:
            waiting.add_metric((report.kind,), report.waiting)
            running.add_metric((report.kind,), report.running)
            counts = itertools.accumulate(report.waits)
            bounds = (*map(str, WAIT_BUCKETS), "+Inf")
            waited.add_metric(
                (report.kind,), list(zip(bounds, counts, strict=True)), report.waited_seconds
            )
        yield from (waiting, running, waited)

    async def run(self, source: HeavyWorkSource) -> None:
        """Ask the node at intervals. While it does not answer, its last report stays."""
        metrics.REGISTRY.register(self)
        try:
            while True:
                try:
                    self._reports = await source.heavy_work()
                except PaddockError as problem:
                    log.debug("metrics of the node are old", extra=fields(reason=problem.message))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            metrics.REGISTRY.unregister(self)
