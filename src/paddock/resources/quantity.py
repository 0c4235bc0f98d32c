"""Quantities in the notation of Kubernetes: `500m` of CPU, `512Mi` of memory."""

import re
from decimal import Decimal

from paddock.kit.errors import FieldProblem, InvalidError

_QUANTITY = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_FACTORS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
}


def parse(text: str, path: str = "") -> Decimal:
    """Parse a quantity. Raise `InvalidError` with the path of the field."""
    match = _QUANTITY.match(text)
    if match is None:
        problem = FieldProblem(path, f"{text!r} is not a quantity such as 2, 500m or 512Mi")
        raise InvalidError(str(problem), problems=[problem])
    return Decimal(match["number"]) * _FACTORS[match["unit"] or ""]


def millis(text: str, path: str = "") -> int:
    """Parse a CPU quantity and return thousandths of a core, rounded up."""
    value = parse(text, path) * 1000
    return int(value.to_integral_value(rounding="ROUND_CEILING"))


def whole(text: str, path: str = "") -> int:
    """Parse a size and return bytes, rounded up."""
    return int(parse(text, path).to_integral_value(rounding="ROUND_CEILING"))


def shown_bytes(size_bytes: int) -> str:
    """Return a size for people, such as `1.5 GiB`."""
    if size_bytes < 1 << 10:
        return f"{size_bytes} bytes"
    unit = next((unit for unit in ("Ti", "Gi", "Mi") if size_bytes >= _FACTORS[unit]), "Ki")
    return f"{size_bytes / int(_FACTORS[unit]):.4g} {unit}B"


def mebibytes(size_bytes: int) -> int:
    """Return a size in whole MiB, rounded down."""
    return size_bytes // (1 << 20)
