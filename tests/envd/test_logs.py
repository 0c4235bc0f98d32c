"""Log lines of envd."""

import logging

from paddock.envd.logs import FieldFormatter


def test_fields_follow_the_message() -> None:
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "task failed", "task": "a b"})

    line = FieldFormatter("%(levelname)s %(message)s").format(record)

    assert line == "INFO task failed task='a b'"
