"""`paddock kubeconfig`: lets kubectl use the declarative API of this machine."""

import base64
from pathlib import Path
from typing import Any

import click
import yaml

from paddock.api.kube.verbs.reviews import EXTRA_TEAM
from paddock.cli.click_ext import examples
from paddock.cli.context import with_target
from paddock.cli.http import Endpoint
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.kit import bearer, private_files
from paddock.kit.errors import UnavailableError, UnsupportedError
from paddock.settings import TLS_DIRECTORY

_NAME = "paddock"


@click.command(epilog=examples("export KUBECONFIG=$(paddock kubeconfig)", "kubectl get sandboxes"))
@click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file.  [default: kubeconfig in the state directory]",
)
@click.option(
    "--key",
    "with_key",
    is_flag=True,
    help="Use the API key in E2B_API_KEY instead of the token of the installation.",
)
@with_target
def kubeconfig(target: CliTarget, output: Output, file: Path | None, *, with_key: bool) -> None:
    """Write a kubeconfig for this machine and print its path.

    It holds the token of the installation: whoever can read it can do everything. With --key it
    holds an API key, which reads and deletes what its team has, as its role allows.
    """
    settings = target.settings
    if not target.is_local or settings.store == "kubernetes":
        raise UnsupportedError(
            "the declarative API of other machines and clusters is not configured here",
            hint="on a cluster, use the kubeconfig of the cluster",
        )
    if not settings.kube_port:
        raise UnsupportedError("kube_port is 0", hint="set it, and start Paddock again")
    authority = settings.state / TLS_DIRECTORY / "ca.crt"
    try:
        certificate = authority.read_bytes()
    except OSError as error:
        raise UnavailableError(
            f"cannot read {authority}: {error.strerror}",
            hint="start Paddock once with `paddock up`, and run this as the same user",
        ) from error
    server = f"https://127.0.0.1:{settings.kube_port}"
    if with_key:
        team = _team_of(Endpoint(target.url, bearer.header(target.api_key)))
        document = render(server, certificate, target.api_key, namespace=team)
    else:
        team = ""
        document = render(server, certificate, target.token)
    name = f"kubeconfig-{team}" if team else "kubeconfig"
    path = (file or settings.state / name).absolute()
    private_files.replace(path, yaml.safe_dump(document, sort_keys=False).encode())
    output.done(str(path), {"file": str(path)})


def _team_of(kube: Endpoint) -> str:
    """Return the team of the credential."""
    review = kube.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {})
    return review["status"]["userInfo"]["extra"][EXTRA_TEAM][0]


def render(
    server: str, authority: bytes, token: str, *, namespace: str = "default"
) -> dict[str, Any]:
    """Return a kubeconfig with one cluster, user and context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": _NAME,
                "cluster": {
                    "server": server,
                    "certificate-authority-data": base64.b64encode(authority).decode(),
                },
            }
        ],
        "users": [{"name": _NAME, "user": {"token": token}}],
        "contexts": [
            {
                "name": _NAME,
                "context": {"cluster": _NAME, "user": _NAME, "namespace": namespace},
            }
        ],
        "current-context": _NAME,
    }
