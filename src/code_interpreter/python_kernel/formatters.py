"""Formats of results that programs can use: tables, charts, JSON.

They are registered by the name of the type, so nothing is imported before the code does.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

_FIGURE = ("matplotlib.figure", "Figure")
_MAX_CELLS = 5_000_000
"""Larger tables are shown as text and HTML only."""


class DataFormatter(BaseFormatter):
    """Tables as lists by column."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


class ChartFormatter(BaseFormatter):
    """Figures as the data that they show."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, obj: Any) -> Any:
        """Return the format of an object. matplotlib removes what is registered for figures."""
        if any((t.__module__, t.__name__) == _FIGURE for t in type(obj).__mro__):
            return chart_of(obj) if self.enabled else None
        return super().__call__(obj)


def install(shell: Any) -> None:
    """Add the formats to the shell."""
    formatter = shell.display_formatter
    data, chart = DataFormatter(parent=formatter), ChartFormatter(parent=formatter)
    data.for_type_by_name("pandas.core.frame", "DataFrame", table)
    # pandas 3 shows the type under its public name.
    data.for_type_by_name("pandas", "DataFrame", table)
    for item in (data, chart):
        formatter.formatters[item.format_type] = item
        if item.format_type not in formatter.active_types:
            formatter.active_types = [*formatter.active_types, item.format_type]
    for kind in (dict, list):
        formatter.formatters["application/json"].for_type(kind, as_json)


def table(frame: Any) -> dict[str, Any] | None:
    """Return the columns of a DataFrame."""
    if frame.size > _MAX_CELLS:
        return None
    return {str(name): plain(column) for name, column in frame.to_dict(orient="list").items()}


def chart_of(figure: Any) -> dict[str, Any]:
    """Return what a figure shows; nothing if it cannot be read."""
    try:
        from e2b_charts import chart_figure_to_dict

        return plain(chart_figure_to_dict(figure))
    except Exception:  # noqa: BLE001 - a figure of any kind; its image is there nevertheless
        return {}


def as_json(value: Any) -> Any:
    """Return a dict or a list if JSON can represent it."""
    try:
        return plain(json.loads(json.dumps(value)))
    except (TypeError, ValueError, RecursionError):
        return None


def plain(value: Any) -> Any:
    """Return a value of types that JSON has."""
    match value:
        case None | bool() | str():
            return value
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float():
            return float(value) if math.isfinite(value) else None
        case int():
            return int(value)
        case _:
            return _converted(value)


def _converted(value: Any) -> Any:
    """Return a value of pandas, NumPy or the standard library in a type that JSON has."""
    if getattr(type(value), "__name__", "") in ("NaTType", "NAType"):
        return None
    is_time: Callable[[], str] | None = getattr(value, "isoformat", None)
    if is_time is not None:
        return is_time()
    item = getattr(value, "item", None)  # a scalar of NumPy
    if item is not None and (made := item()) is not value:
        return plain(made)
    return str(value)
