"""Limits of network bandwidth and disk I/O: a ceiling per template and per installation. Pure."""

from msgspec import structs

from paddock.runtime.port import Limits

NETWORK = ("ingress_bandwidth", "egress_bandwidth")
DISK = ("io_read_bandwidth", "io_write_bandwidth", "io_read_iops", "io_write_iops")


def capped(wanted: Limits, ceiling: Limits) -> Limits:
    """Return limits whose rates are at most those of `ceiling`; other limits stay."""
    rates = {
        name: _lower(getattr(wanted, name), getattr(ceiling, name)) for name in (*NETWORK, *DISK)
    }
    return structs.replace(wanted, **rates)


def _lower(one: int | None, other: int | None) -> int:
    """Return the lower of two rates; 0 and `None` are no limit."""
    return min((rate for rate in (one, other) if rate), default=0)


def with_rates(limits: Limits, source: Limits) -> Limits:
    """Return `limits` with the rates of `source`."""
    return structs.replace(limits, **{name: getattr(source, name) for name in (*NETWORK, *DISK)})
