"""The wire format of Jupyter messages: frames, a signature, four dictionaries in JSON."""

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

_DELIMITER = b"<IDS|MSG>"
_PARTS = 4
_VERSION = "5.3"


class Message(NamedTuple):
    """A message from a kernel."""

    kind: str
    parent: str
    """Id of the request that it belongs to; empty if to none."""
    content: Mapping[str, Any]


class Session:
    """Encodes requests and decodes messages of one kernel."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._id = os.urandom(16).hex()
        self._count = 0

    def encode(self, kind: str, content: Mapping[str, Any]) -> tuple[str, list[bytes]]:
        """Return the id and the frames of a request."""
        self._count += 1
        message_id = f"{self._id}_{self._count}"
        header = {
            "msg_id": message_id,
            "msg_type": kind,
            "session": self._id,
            "username": "user",
            "date": datetime.now(UTC).isoformat(),
            "version": _VERSION,
        }
        parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
        signature = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            signature.update(part)
        return message_id, [_DELIMITER, signature.hexdigest().encode(), *parts]


def decode(frames: Sequence[bytes]) -> Message | None:
    """Return the message in frames, or None if it is malformed.

    The signature is not checked: the sockets are in a directory that only this user can enter, or
    belong to a port that the kernel listens at.
    """
    try:
        start = frames.index(_DELIMITER) + 2
        header, parent, _, content = (json.loads(part) for part in frames[start : start + _PARTS])
        return Message(str(header["msg_type"]), str(parent.get("msg_id", "")), content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
