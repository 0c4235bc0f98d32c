"""The settings of an installation that limit network bandwidth and disk I/O of sandboxes."""

from paddock.resources import quantity
from paddock.runtime.port import Limits
from paddock.settings import Settings


def rates_of(settings: Settings) -> Limits:
    """Return the rates of the settings. `InvalidError` names a setting that is no quantity."""

    def read(name: str) -> int:
        return quantity.whole(getattr(settings, name), name)

    return Limits(
        ingress_bandwidth=read("sandbox_ingress_bandwidth"),
        egress_bandwidth=read("sandbox_egress_bandwidth"),
        io_read_bandwidth=read("sandbox_io_read_bandwidth"),
        io_write_bandwidth=read("sandbox_io_write_bandwidth"),
        io_read_iops=settings.sandbox_io_read_iops,
        io_write_iops=settings.sandbox_io_write_iops,
    )
