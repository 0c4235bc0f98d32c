"""`paddock audit` on files of an audit log."""

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddock.api.audit import reader
from paddock.api.audit.event import AuditedObject, AuditEvent, AuditStatus, AuditUser, encode
from paddock.api.audit.files import AuditFiles
from paddock.cli.audit.rows import parse_since
from paddock.cli.program import program
from paddock.kit.errors import InvalidError

NOW = datetime(2030, 1, 2, 12, tzinfo=UTC)


def event(minute: int, *, team: str = "research", key: str = "k1", code: int = 201) -> AuditEvent:
    at = f"2030-01-02T12:{minute:02}:00.000000Z"
    return AuditEvent(
        audit_id=f"r{minute}",
        request_uri="/sandboxes",
        verb="create",
        user=AuditUser(f"paddock:key:{key}", key, (team, "member")),
        source_ips=("192.0.2.1",),
        object_ref=AuditedObject(resource="sandboxes"),
        response_status=AuditStatus(code, reason="Forbidden" if code == 403 else ""),
        request_received_timestamp=at,
        stage_timestamp=at,
        annotations={"paddock.dev/created": "iabc"},
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    first = AuditFiles(tmp_path / "audit", max_bytes=600, count=4)
    second = AuditFiles(tmp_path / "audit", max_bytes=600, count=4)
    first.write(encode(event(1)))
    second.write(encode(event(2, team="other", key="k2")))
    first.write(encode(event(3, code=403)))
    second.write(b'{"kind":"Ev')
    for sink in (first, second):
        sink.close()
    return tmp_path / "audit"


def show(directory: Path, *arguments: str) -> Result:
    environment = {"PADDOCK_STATE_DIR": str(directory.parent), "PADDOCK_URL": ""}
    return CliRunner().invoke(program, ["audit", *arguments], env=environment)


def ids(shown: Result) -> list[str]:
    assert shown.exit_code == 0, shown.output
    return [json.loads(line)["auditID"] for line in shown.output.splitlines()]


def test_lines_of_all_files_are_shown_in_order(directory: Path) -> None:
    shown = show(directory)
    assert shown.output.splitlines() == [
        (
            "2030-01-02T12:01:00Z 201 create sandboxes team=research key=k1 from=192.0.2.1 "
            "created=iabc request=r1"
        ),
        (
            "2030-01-02T12:02:00Z 201 create sandboxes team=other key=k2 from=192.0.2.1 "
            "created=iabc request=r2"
        ),
        (
            "2030-01-02T12:03:00Z 403 create sandboxes team=research key=k1 from=192.0.2.1 "
            "Forbidden created=iabc request=r3"
        ),
    ]


def test_lines_are_filtered(directory: Path) -> None:
    assert ids(show(directory, "-o", "json")) == ["r1", "r2", "r3"]
    assert ids(show(directory, "-o", "json", "--team", "research")) == ["r1", "r3"]
    assert ids(show(directory, "-o", "json", "--key", "k2")) == ["r2"]
    assert ids(show(directory, "-o", "json", "--refused")) == ["r3"]
    since = "2030-01-02T13:02:00+01:00"
    assert ids(show(directory, "-o", "json", "--since", since)) == ["r2", "r3"]


def test_ages_and_times_are_parsed_and_others_are_refused() -> None:
    assert parse_since("2h", NOW) == "2030-01-02T10:00:00.000000Z"
    assert parse_since("1d", NOW) == "2030-01-01T12:00:00.000000Z"
    with pytest.raises(InvalidError, match="neither an age nor a time"):
        parse_since("yesterday", NOW)


def test_a_missing_log_is_an_error_with_a_hint(tmp_path: Path) -> None:
    shown = show(tmp_path / "audit")
    assert shown.exit_code == 1


def test_following_misses_no_line_when_files_are_rotated(tmp_path: Path) -> None:
    sink = AuditFiles(tmp_path, max_bytes=2000, count=4)
    sink.write(encode(event(0)))

    def write() -> None:
        for minute in range(1, 31):
            sink.write(encode(event(minute)))
            time.sleep(reader.POLL_SECONDS / 2)

    seen: list[str] = []
    follower = reader.follow(tmp_path)
    writer = threading.Timer(0.3, write)
    writer.start()
    for _, found in follower:
        seen.append(found.audit_id)
        if len(seen) == 30:
            break
    writer.join()
    sink.close()
    assert seen == [f"r{minute}" for minute in range(1, 31)]
