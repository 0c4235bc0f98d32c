"""`paddock kube`: Paddock on a cluster. Applies, shows and removes its objects with `kubectl`."""

import secrets
import sys
from typing import Any

import click
from msgspec import structs

from paddock.cli.context import with_place
from paddock.cli.kube.kubectl import Kubectl, as_list
from paddock.cli.kube.manifests import definitions, manifests, secret
from paddock.cli.kube.options import KubeOptions, Manifest, labels
from paddock.cli.kube.webhook import WEBHOOK_NAME, certificate
from paddock.cli.output import Output
from paddock.cli.target import Place
from paddock.kit import ids
from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.kubernetes import names

_ROLES = ("controllers", "api", "gateway")
_PART_OF = "app.kubernetes.io/part-of=paddock"
_SANDBOXES = "/apis/paddock.dev/v1alpha1/sandboxes"
_ROUNDS = 5


@click.group()
def kube() -> None:
    """Paddock on Kubernetes: install, uninstall, status, render."""


def _options(command: Any) -> Any:
    for option in (
        click.option("--kubeconfig", help="Which cluster.  [default: kubectl's own]"),
        click.option("--context", help="Which context of the kubeconfig."),
        click.option("--namespace", default="paddock-system", show_default=True),
    ):
        command = option(command)
    return command


def _choices(command: Any) -> Any:
    for option in (
        click.option("--image", required=True, help="Paddock's image (deploy/image)."),
        click.option("--replicas", default=2, show_default=True, help="Of each role."),
        click.option("--node/--no-node", default=False, help="Freeze pods by an agent per node."),
        click.option("--pool-size", default=2, show_default=True, help="Warm sandboxes; 0: none."),
        click.option("--default-image", default="debian:13", show_default=True),
        click.option("--webhook/--no-webhook", default=False, help="Check what people apply."),
        click.option("--monitoring", help="Namespace of a Prometheus operator's Prometheus."),
    ):
        command = option(command)
    return command


@kube.command("install")
@_options
@_choices
@click.option("--wait", default=0, metavar="SECONDS", help="Return when all pods are ready.")
@with_place
def install(
    _place: Place,
    output: Output,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    wait: int,
    **chosen: Any,
) -> None:
    """Install or upgrade; keys and sandboxes stay."""
    kubectl = Kubectl(kubeconfig, context)
    options = _chosen(namespace, **chosen)
    kinds = definitions()
    kubectl.apply(kinds)
    served = [f"crd/{item['metadata']['name']}" for item in kinds]
    kubectl.wait("--for=condition=Established", "--timeout=60s", *served)
    kubectl.apply([item for item in manifests(options) if item["kind"] == "Namespace"])
    key = _ensure_secret(kubectl, options)
    if options.has_webhook:
        options = structs.replace(options, ca_bundle=_ensure_certificate(kubectl, options))
    else:
        # One of an earlier install would be asked about every change, and not be there.
        kubectl.delete("validatingwebhookconfiguration", "paddock")
    objects = manifests(options)
    kubectl.apply_when_served([item for item in objects if item["kind"] != "Namespace"])
    said = f"installed in {namespace}" + (f"\nAPI key: {key}" if key else "")
    output.done(said, {"namespace": namespace, "objects": len(objects), "apiKey": key})
    # The key is told before: it is shown this once.
    if wait:
        _await_pods(kubectl, objects, namespace, wait)


def _await_pods(kubectl: Kubectl, objects: list[Manifest], namespace: str, seconds: int) -> None:
    for item in objects:
        if item["kind"] in ("Deployment", "DaemonSet"):
            name = f"{item['kind'].lower()}/{item['metadata']['name']}"
            try:
                kubectl.roll_out(name, "-n", namespace, f"--timeout={seconds}s")
            except InvalidError as error:
                raise UnavailableError(
                    f"{name} is installed but not ready: {error.message}",
                    hint=f"`kubectl -n {namespace} get pods` and `kubectl -n {namespace} logs "
                    f"{name}` say why",
                ) from error


def _ensure_secret(kubectl: Kubectl, options: KubeOptions) -> str | None:
    """Make the Secret once: a changed seed would make every token worthless."""
    if kubectl.get("secret", options.secret, "-n", options.namespace):
        return None
    key = ids.api_key()
    seed, token = secrets.token_hex(32), secrets.token_hex(24)
    kubectl.create(secret(options, seed=seed, token=token, api_key=key))
    return key


def _ensure_certificate(kubectl: Kubectl, options: KubeOptions) -> str:
    """Make the webhook's certificate where there is none; give what it is believed by."""
    found = kubectl.get("secret", WEBHOOK_NAME, "-n", options.namespace)
    if not found:
        found = certificate(options.namespace, labels("api"))
        kubectl.create(found)
    return str(found["data"]["tls.crt"])


@kube.command("uninstall")
@_options
@click.option("--purge", is_flag=True, help="CRDs, sandboxes, keys and the namespace as well.")
@with_place
def uninstall(
    _place: Place,
    output: Output,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    purge: bool,
) -> None:
    """Remove Paddock; sandboxes, keys and CRDs stay unless purged."""
    kubectl = Kubectl(kubeconfig, context)
    prometheus = kubectl.get("crd", "podmonitors.monitoring.coreos.com")
    options = KubeOptions(
        namespace=namespace,
        has_node=True,
        has_webhook=True,
        monitoring="monitoring" if prometheus else "",
    )
    objects = manifests(options)
    # First of all: nobody will answer it any more.
    kubectl.delete("validatingwebhookconfiguration", "paddock")
    has_controllers = _is_led(kubectl, namespace)
    if purge and has_controllers:
        # Sandboxes go while there is still somebody to see to it.
        _delete_resources(kubectl)
    kept = ("Namespace", "SandboxTemplate", "SandboxPool")
    kubectl.delete_all([item for item in objects if item["kind"] not in kept])
    if purge:
        if not has_controllers:
            _delete_resources(kubectl, is_abandoned=True)
        _delete_traces(kubectl)
        kubectl.delete_all(definitions())
        kubectl.delete("namespace", namespace)
    output.done("uninstalled" + (" and purged" if purge else ""), {"purged": purge})


def _is_led(kubectl: Kubectl, namespace: str) -> bool:
    found = kubectl.get("deployment", "paddock-controllers", "-n", namespace)
    return bool(found.get("status", {}).get("readyReplicas"))


def _delete_resources(kubectl: Kubectl, *, is_abandoned: bool = False) -> None:
    """Delete every object of our kinds; abandoned, those that nobody would finish as well."""
    # What makes others goes first: pools would replace the sandboxes that go.
    known = [item["metadata"]["name"] for item in reversed(definitions())]
    found = kubectl.get("crd", *known)
    there = {item["metadata"]["name"] for item in found.get("items", ())}
    kinds = [kind for kind in known if kind in there]
    for _ in range(_ROUNDS):
        for kind in kinds:
            if is_abandoned:
                kubectl.release(kind)
            kubectl.delete(kind, "--all", "--all-namespaces", "--wait=true", "--timeout=120s")
        # One may have been about to be made when its pool went.
        if not kinds or not kubectl.count(_SANDBOXES):
            return


def _delete_traces(kubectl: Kubectl) -> None:
    """Delete what was made for sandboxes: their pods when abandoned, policies that all shared."""
    kubectl.delete("pods,pvc", "--all-namespaces", "-l", names.LABEL_UID)
    ours = f"{names.LABEL_MANAGED}={names.MANAGER}"
    kubectl.delete("networkpolicies", "--all-namespaces", "-l", ours)


@kube.command("status")
@_options
@with_place
def status(
    _place: Place, output: Output, kubeconfig: str | None, context: str | None, namespace: str
) -> None:
    """Show what runs, who leads, and how many sandboxes there are."""
    kubectl = Kubectl(kubeconfig, context)
    found = kubectl.get("deployments", "-n", namespace, "-l", _PART_OF)
    by_name: dict[str, Any] = {item["metadata"]["name"]: item for item in found.get("items", ())}
    lease = kubectl.get("lease", "paddock-controllers", "-n", namespace)
    leader = str(lease.get("spec", {}).get("holderIdentity") or "nobody")
    rows: list[dict[str, Any]] = []
    for role in _ROLES:
        item: dict[str, Any] = by_name.get(f"paddock-{role}", {})
        ready = int(item.get("status", {}).get("readyReplicas", 0))
        wanted = int(item.get("spec", {}).get("replicas", 0))
        rows.append({"role": role, "ready": ready, "wanted": wanted})
    if not by_name:
        raise NotFoundError(
            f"Paddock is not installed in {namespace}", hint="`paddock kube install` does it"
        )
    if agents := kubectl.get("daemonset", "paddock-node", "-n", namespace).get("status"):
        ready, wanted = int(agents["numberReady"]), int(agents["desiredNumberScheduled"])
        rows.append({"role": "node", "ready": ready, "wanted": wanted})
    sandboxes = kubectl.count(_SANDBOXES)
    if output.is_json:
        output.data({"leader": leader, "roles": rows, "sandboxes": sandboxes})
        return
    cells = [
        (str(row["role"]), f"{row['ready']}/{row['wanted']}", leader if place == 0 else "")
        for place, row in enumerate(rows)
    ]
    output.rows(rows, ("role", "ready", "leader"), cells)
    output.done(f"{sandboxes} sandboxes", None)


@kube.command("render")
@_choices
@click.option("--namespace", default="paddock-system", show_default=True)
@with_place
def render(_place: Place, _output: Output, namespace: str, **chosen: Any) -> None:
    """Print what `install` applies, but for CRDs and Secrets, as a List.

    A webhook's certificate is then left to cert-manager.
    """
    sys.stdout.write(as_list(manifests(_chosen(namespace, **chosen))) + "\n")


def _chosen(
    namespace: str,
    *,
    image: str,
    replicas: int,
    node: bool,
    pool_size: int,
    default_image: str,
    webhook: bool,
    monitoring: str | None,
) -> KubeOptions:
    return KubeOptions(
        image=image,
        namespace=namespace,
        replicas=replicas,
        has_node=node,
        pool_size=pool_size,
        default_image=default_image,
        has_webhook=webhook,
        monitoring=monitoring or "",
    )
