"""The requests that the node, the control plane and the CLI send to envd, without transport.

Transports differ and stay with their callers: a unix socket on the node's event loop
(`runtime/local/envd/envd_client.py`), a pod's address (`runtime/kubernetes/envd_client.py`), the
address in a sandbox's status (`adapters/envd_session.py`), and blocking HTTP through the gateway
(`cli/sandbox/envd_client.py`).
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from paddock.envd.config import EnvdSettings
from paddock.kit.errors import UnavailableError

INIT_PATH = "/init"
START_PATH = "/process.Process/Start"
STREAM_TYPE = "application/connect+json"
CONNECT_HEADERS: Mapping[str, str] = {"Connect-Protocol-Version": "1"}
STREAM_HEADERS: Mapping[str, str] = {**CONNECT_HEADERS, "Content-Type": STREAM_TYPE}
END_STREAM = 2
"""The flag of the last frame of a Connect stream."""
FRAME_HEAD = struct.Struct(">BI")
"""The head of a Connect frame: flags, and the length of the message."""
_MAX_QUOTED = 512


def init_body(
    settings: EnvdSettings, *, sandbox_id: str | None = None, template_id: str | None = None
) -> bytes:
    """Return the body of `POST /init`; ids that are `None` stay as they are."""
    body: dict[str, object] = {
        "envVars": settings.env_vars,
        # Empty clears the value; a field left out would keep it.
        "accessToken": settings.access_token or "",
        "defaultUser": settings.default_user,
        "defaultWorkdir": settings.default_workdir or "",
        "outbound": settings.outbound,
    }
    if sandbox_id is not None:
        body |= {"sandboxId": sandbox_id, "templateId": template_id or ""}
    return msgspec.json.encode(body)


def shell_command(
    command: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    has_stdin: bool = False,
) -> dict[str, Any]:
    """Return the message that starts a command in a login shell."""
    process: dict[str, Any] = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
    return {"process": _with_options(process, env, cwd), "stdin": has_stdin}


def login_shell(
    size: tuple[int, int], *, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> dict[str, Any]:
    """Return the message that starts an interactive shell on a terminal of columns and rows."""
    process: dict[str, Any] = {"cmd": "/bin/bash", "args": ["-i", "-l"]}
    pty = {"size": {"cols": size[0], "rows": size[1]}}
    return {"process": _with_options(process, env, cwd), "pty": pty}


def _with_options(
    process: dict[str, Any], env: Mapping[str, str] | None, cwd: str | None
) -> dict[str, Any]:
    if env:
        process["envs"] = dict(env)
    if cwd:
        process["cwd"] = cwd
    return process


def frame(message: Any) -> bytes:
    """Encode one message of a Connect stream."""
    data = msgspec.json.encode(message)
    return FRAME_HEAD.pack(0, len(data)) + data


def read_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield flags and message of each complete frame."""
    position = 0
    while position + FRAME_HEAD.size <= len(data):
        flags, size = FRAME_HEAD.unpack_from(data, position)
        start = position + FRAME_HEAD.size
        position = start + size
        yield flags, data[start:position]


def refusal(
    sandbox: str,
    path: str,
    status: int,
    body: bytes = b"",
    *,
    retry_after_seconds: float | None = None,
) -> UnavailableError:
    """Return the error for a response of envd other than success."""
    text = body[:_MAX_QUOTED].decode(errors="replace")
    message = f"envd of sandbox {sandbox} refused {path} with status {status}"
    return UnavailableError(
        f"{message}: {text}" if text else message, retry_after_seconds=retry_after_seconds
    )
