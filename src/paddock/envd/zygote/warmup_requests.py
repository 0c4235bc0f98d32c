"""The HTTP requests that the zygote serves to itself while it warms up."""

_START_PATH, _CONNECT = "/process.Process/Start", "application/connect+json"
_START = b'{"process":{"cmd":"/bin/true"},"stdin":true}'
_SHELL_COMMAND = b'{"process":{"cmd":"/bin/bash","args":["-l","-c","true"]},"stdin":false}'
_SETTINGS = b'{"envVars":{"A":"b"},"accessToken":"warm","defaultUser":"user","sandboxId":"warm"}'


def _post(path: str, kind: str, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join((*lines, "Connection: close", *more, "", "")).encode() + body


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


HEALTH = b"GET /health HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n"
INIT = _post("/init", "application/json", _SETTINGS)
"""The claim of an envd in the warm stock."""
COMMAND = _post(_START_PATH, _CONNECT, _framed(_SHELL_COMMAND), "X-Access-Token: warm")
"""The first command after the claim."""


def all_routes(directory: str) -> list[bytes]:
    """Return requests to every route, for files below a directory."""

    def get(path: str, *more: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", "Connection: close", *more]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    path = b'{"path":"%b"}' % directory.encode()
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="b"\r\n\r\n1\r\n--x--\r\n'
    filesystem = "/filesystem.Filesystem/"
    return [
        get("/health", "Origin: here"),
        get("/metrics"),
        get("/envs"),
        _post(_START_PATH, _CONNECT, _framed(_START)),
        _post("/process.Process/List", "application/json", b"{}"),
        _post("/process.Process/List", "application/proto", b""),
        _post("/files?path=a", "application/octet-stream", b"x" * 2_000_000),
        _post("/files", "multipart/form-data; boundary=x", form),
        get("/files?path=a"),
        get("/files?path=a", "Accept-Encoding: gzip"),
        get("/files?path=a", "Range: bytes=1-2"),
        get("/files?path=missing"),
        _post(filesystem + "Stat", "application/json", path),
        _post(filesystem + "ListDir", "application/json", path),
        _post(filesystem + "CreateWatcher", "application/json", path),
        _post(filesystem + "Remove", "application/json", b'{"path":"a"}'),
        _post(filesystem + "Stat", "application/json", b'{"path":"a"}'),
    ]
