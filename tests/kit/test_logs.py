"""Log lines: one line each, whatever untrusted values they contain."""

import logging

from paddock.kit.logs import JsonFormatter, TextFormatter, fields


def line(formatter: logging.Formatter, **facts: object) -> str:
    record = logging.LogRecord("here", logging.INFO, __file__, 1, "said", (), None)
    record.__dict__.update(fields(**facts))
    return formatter.format(record)


def test_untrusted_values_are_escaped_in_log_lines() -> None:
    told = line(TextFormatter(), path="/a\nforged\x1b[31m\x9b31m\u2028", name="né 東", count=3)
    assert told.endswith(r" here said path=/a\nforged\x1b[31m\x9b31m\u2028 name=né 東 count=3")
    assert len(line(JsonFormatter(), path="/a\nforged").splitlines()) == 1
