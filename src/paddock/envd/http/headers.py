"""HTTP header values for the file routes: dates, ranges, encodings, content types, file names.

No I/O. The standard library's parsers load locale and mail packages or system files, none of which
exist where envd runs.
"""

import calendar
import mimetypes
import re
import time
from urllib.parse import quote

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DATE = re.compile(r"\w{3}, (\d\d) (\w{3}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT")
_RANGE = re.compile(r"bytes=\s*(\d*)-(\d*)\s*")
_TYPES = mimetypes.MimeTypes(filenames=())
_TEXT_TYPES = {"application/javascript", "application/json", "application/xml", "image/svg+xml"}


class UnsatisfiableRangeError(Exception):
    """The range lies outside the file."""


def format_date(seconds: float) -> str:
    """Format a Unix time as an HTTP date."""
    t = time.gmtime(max(seconds, 0))
    month = _MONTHS[t.tm_mon - 1]
    return (
        f"{_DAYS[t.tm_wday]}, {t.tm_mday:02d} {month} {t.tm_year:04d} "
        f"{t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT"
    )


def parse_date(text: str | None) -> int | None:
    """Parse an HTTP date; return `None` for anything else."""
    match = _DATE.fullmatch(text.strip()) if text else None
    if match is None or match[2] not in _MONTHS:
        return None
    day, year, *clock = (int(match[i]) for i in (1, 3, 4, 5, 6))
    try:
        return calendar.timegm((year, _MONTHS.index(match[2]) + 1, day, *clock))
    except (ValueError, OverflowError):
        return None


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Parse a Range header into offset and length; `None` means the whole file.

    Several ranges in one request are answered with the whole file, which HTTP allows.
    """
    match = _RANGE.fullmatch(header) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if len(match[1]) > 18 or len(match[2]) > 18:
        raise UnsatisfiableRangeError
    if not match[1]:
        length = min(int(match[2]), size)
        if length == 0:
            raise UnsatisfiableRangeError
        return size - length, length
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if match[2] and int(match[2]) < first:
        return None
    if first >= size:
        raise UnsatisfiableRangeError
    return first, last - first + 1


def choose_encoding(header: str | None) -> str | None:
    """Return `gzip` or `identity`, as the client prefers, or `None` if it accepts neither."""
    if header is None or not header.strip():
        return "identity"
    weights: dict[str, float] = {}
    for item in header.split(","):
        name, *rest = (piece.strip().lower() for piece in item.split(";"))
        weight = 1.0
        for piece in rest:
            if piece.startswith("q="):
                weight = _weight(piece[2:])
        weights[name] = weight
    anything = weights.get("*")
    gzip = weights.get("gzip", anything if anything is not None else 0.0)
    identity = weights.get("identity", 0.0 if anything == 0 else None)
    if gzip > 0 and gzip >= (identity or 0.0):
        return "gzip"
    if identity is None or identity > 0:
        return "identity"
    return None


def _weight(text: str) -> float:
    try:
        return max(0.0, min(1.0, float(text)))
    except ValueError:
        return 1.0


def content_type(name: str, head: bytes) -> str:
    """Guess the content type by extension, else by the first bytes."""
    known, encoding = _TYPES.guess_type("x" + name[name.rfind(".") :] if "." in name else "x")
    if known and not encoding:
        is_text = known.startswith("text/") or known in _TEXT_TYPES
        return f"{known}; charset=utf-8" if is_text else known
    if b"\0" in head:
        return "application/octet-stream"
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return "application/octet-stream"
    return "text/plain; charset=utf-8"


def disposition(name: str) -> str:
    """Return a Content-Disposition for a file shown inline."""
    if name.isascii() and name.isprintable():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    return "inline; filename*=utf-8''" + quote(name, safe="", errors="surrogateescape")
