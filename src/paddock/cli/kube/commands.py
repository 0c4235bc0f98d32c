"""`paddock kube`: installs, shows and removes Paddock on a cluster with `kubectl`."""

import secrets
import sys
from typing import Any

import click
from msgspec import structs

from paddock.cli.context import with_target
from paddock.cli.kube.kubectl import Kubectl, as_list
from paddock.cli.kube.manifests import definitions, manifests, node, secret
from paddock.cli.kube.options import PART_OF, KubeOptions, Manifest, labels
from paddock.cli.kube.seed import SeedRotation
from paddock.cli.kube.webhook import WEBHOOK_NAME, certificate
from paddock.cli.output import Output
from paddock.cli.target import CliTarget
from paddock.kit import ids
from paddock.kit.errors import InvalidError, NotFoundError, UnavailableError
from paddock.runtime.kubernetes import names

_ROLES = ("controllers", "api", "gateway")
_SANDBOXES = "/apis/paddock.dev/v1alpha1/sandboxes"
_ROUNDS = 5


@click.group()
def kube() -> None:
    """Install, inspect and remove Paddock on Kubernetes."""


def _options(command: Any) -> Any:
    for option in (
        click.option("--kubeconfig", help="Use this kubeconfig.  [default: the one of kubectl]"),
        click.option(
            "--context", help="Use this context of the kubeconfig.  [default: the current one]"
        ),
        click.option(
            "--namespace",
            default="paddock-system",
            show_default=True,
            help="Set the namespace of Paddock.",
        ),
    ):
        command = option(command)
    return command


def _choices(command: Any) -> Any:
    for option in (
        click.option(
            "--image", required=True, help="Use this image of Paddock (see deploy/image)."
        ),
        click.option(
            "--replicas", default=2, show_default=True, help="Run this many replicas of each role."
        ),
        click.option(
            "--node/--no-node",
            default=True,
            help="Run an agent per node that freezes pods.  [default: yes]",
        ),
        click.option(
            "--pool-size",
            default=2,
            show_default=True,
            help="Keep this many sandboxes warm; 0: no pool.",
        ),
        click.option(
            "--default-image",
            default="debian:13",
            show_default=True,
            help="Use this image for the default template.",
        ),
        click.option(
            "--webhook/--no-webhook",
            default=False,
            help="Check applied resources with an admission webhook.  [default: no]",
        ),
        click.option(
            "--monitoring",
            help="Let Prometheus in this namespace read metrics.  [default: none]",
        ),
        click.option(
            "--tls-secret",
            help="Serve TLS with the certificate in this Secret.  [default: no TLS]",
        ),
        click.option(
            "--tls-image",
            default=KubeOptions().tls_image,
            show_default=True,
            help="Use this image of Envoy, which serves TLS.",
        ),
    ):
        command = option(command)
    return command


@kube.command("install")
@_options
@_choices
@click.option(
    "--wait",
    default=0,
    metavar="SECONDS",
    help="Wait until all pods are ready.  [default: do not wait]",
)
@with_target
def install(
    _target: CliTarget,
    output: Output,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    wait: int,
    **chosen: Any,
) -> None:
    """Install or upgrade Paddock; keys and sandboxes are kept."""
    kubectl = Kubectl(kubeconfig, context)
    options = _chosen(namespace, **chosen)
    kinds = definitions()
    kubectl.apply(kinds)
    served = [f"crd/{item['metadata']['name']}" for item in kinds]
    kubectl.wait("--for=condition=Established", "--timeout=60s", *served)
    kubectl.apply([item for item in manifests(options) if item["kind"] == "Namespace"])
    key = _ensure_secret(kubectl, options)
    if options.tls_secret:
        _require_tls_secret(kubectl, options)
    if not options.has_node:
        kubectl.delete_all(node(options))
    if options.has_webhook:
        options = structs.replace(options, ca_bundle=_ensure_certificate(kubectl, options))
    else:
        # The API server would call the webhook of an earlier install, which is gone.
        kubectl.delete("validatingwebhookconfiguration", "paddock")
    objects = manifests(options)
    kubectl.apply_when_served([item for item in objects if item["kind"] != "Namespace"])
    text = f"installed in {namespace}" + (f"\nAPI key: {key}" if key else "")
    output.done(text, {"namespace": namespace, "objects": len(objects), "apiKey": key})
    # Print the key before waiting: it cannot be shown again.
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
                    f"{name} is installed, but not ready: {error.message}",
                    hint=f"`kubectl -n {namespace} get pods` and `kubectl -n {namespace} logs "
                    f"{name}` show why",
                ) from error


def _ensure_secret(kubectl: Kubectl, options: KubeOptions) -> str | None:
    """Create the Secret once: another seed would invalidate all tokens."""
    if kubectl.get("secret", options.secret, "-n", options.namespace):
        return None
    key = ids.api_key()
    seed, token = secrets.token_hex(32), secrets.token_hex(24)
    kubectl.create(secret(options, seed=seed, token=token, api_key=key))
    return key


def _require_tls_secret(kubectl: Kubectl, options: KubeOptions) -> None:
    """Fail before the roles are changed: gateways would wait for the Secret."""
    if not kubectl.get("secret", options.tls_secret, "-n", options.namespace):
        raise NotFoundError(
            f"there is no Secret {options.tls_secret} in namespace {options.namespace}",
            hint=f"`kubectl -n {options.namespace} create secret tls {options.tls_secret} "
            "--cert=FILE --key=FILE` creates it",
        )


def _ensure_certificate(kubectl: Kubectl, options: KubeOptions) -> str:
    """Create the webhook's certificate if it is missing; return its CA bundle."""
    found = kubectl.get("secret", WEBHOOK_NAME, "-n", options.namespace)
    if not found:
        found = certificate(options.namespace, labels("api"))
        kubectl.create(found)
    # A Secret of an older version has no authority: its certificate is self-signed.
    return str(found["data"].get("ca.crt") or found["data"]["tls.crt"])


@kube.command("uninstall")
@_options
@click.option("--purge", is_flag=True, help="Remove CRDs, sandboxes, keys and the namespace, too.")
@with_target
def uninstall(
    _target: CliTarget,
    output: Output,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    purge: bool,
) -> None:
    """Remove Paddock; sandboxes, keys and CRDs are kept without --purge."""
    kubectl = Kubectl(kubeconfig, context)
    prometheus = kubectl.get("crd", "podmonitors.monitoring.coreos.com")
    options = KubeOptions(
        namespace=namespace,
        has_webhook=True,
        monitoring="monitoring" if prometheus else "",
        tls_secret="any",  # noqa: S106 - not deleted; the other objects of TLS are
    )
    objects = manifests(options)
    # First, because nothing will answer it any more.
    kubectl.delete("validatingwebhookconfiguration", "paddock")
    has_controllers = _has_controllers(kubectl, namespace)
    if purge and has_controllers:
        # Delete sandboxes while the controllers still run.
        _delete_resources(kubectl)
    kept = ("Namespace", "SandboxTemplate", "SandboxPool")
    kubectl.delete_all([item for item in objects if item["kind"] not in kept])
    if purge:
        if not has_controllers:
            _delete_resources(kubectl, is_orphaned=True)
        _delete_leftovers(kubectl)
        kubectl.delete_all(definitions())
        kubectl.delete("namespace", namespace)
    output.done("uninstalled" + (" and purged" if purge else ""), {"purged": purge})


def _has_controllers(kubectl: Kubectl, namespace: str) -> bool:
    found = kubectl.get("deployment", "paddock-controllers", "-n", namespace)
    return bool(found.get("status", {}).get("readyReplicas"))


def _delete_resources(kubectl: Kubectl, *, is_orphaned: bool = False) -> None:
    """Delete all objects of our kinds; if orphaned, remove their finalizers first."""
    # Owners first: pools would replace deleted sandboxes.
    known = [item["metadata"]["name"] for item in reversed(definitions())]
    found = kubectl.get("crd", *known)
    there = {item["metadata"]["name"] for item in found.get("items", ())}
    kinds = [kind for kind in known if kind in there]
    for _ in range(_ROUNDS):
        for kind in kinds:
            if is_orphaned:
                kubectl.remove_finalizers(kind)
            kubectl.delete(kind, "--all", "--all-namespaces", "--wait=true", "--timeout=120s")
        # A sandbox may have been created while its pool was deleted.
        if not kinds or not kubectl.count(_SANDBOXES):
            return


def _delete_leftovers(kubectl: Kubectl) -> None:
    """Delete orphaned pods and volume claims, and the network policies of sandboxes."""
    kubectl.delete("pods,pvc", "--all-namespaces", "-l", names.LABEL_UID)
    ours = f"{names.LABEL_MANAGED}={names.MANAGER}"
    kubectl.delete("networkpolicies", "--all-namespaces", "-l", ours)


@kube.command("status")
@_options
@with_target
def status(
    _target: CliTarget, output: Output, kubeconfig: str | None, context: str | None, namespace: str
) -> None:
    """Show the roles, the leader and the number of sandboxes."""
    kubectl = Kubectl(kubeconfig, context)
    found = kubectl.get("deployments", "-n", namespace, "-l", PART_OF)
    by_name: dict[str, Any] = {item["metadata"]["name"]: item for item in found.get("items", ())}
    lease = kubectl.get("lease", "paddock-controllers", "-n", namespace)
    leader = str(lease.get("spec", {}).get("holderIdentity") or "none")
    rows: list[dict[str, Any]] = []
    for role in _ROLES:
        item: dict[str, Any] = by_name.get(f"paddock-{role}", {})
        ready = int(item.get("status", {}).get("readyReplicas", 0))
        wanted = int(item.get("spec", {}).get("replicas", 0))
        rows.append({"role": role, "ready": ready, "wanted": wanted})
    if not by_name:
        raise NotFoundError(
            f"Paddock is not installed in {namespace}", hint="`paddock kube install` installs it"
        )
    if agents := kubectl.get("daemonset", "paddock-node", "-n", namespace).get("status"):
        ready, wanted = int(agents["numberReady"]), int(agents["desiredNumberScheduled"])
        rows.append({"role": "node", "ready": ready, "wanted": wanted})
    sandboxes = kubectl.count(_SANDBOXES)
    if output.is_json:
        output.data({"leader": leader, "roles": rows, "sandboxes": sandboxes})
        return
    cells = [
        (str(row["role"]), f"{row['ready']}/{row['wanted']}", leader if index == 0 else "")
        for index, row in enumerate(rows)
    ]
    output.rows(rows, ("role", "ready", "leader"), cells)
    output.done(f"{sandboxes} sandboxes", None)


@kube.command("rotate-seed")
@_options
@click.option(
    "--secret",
    "secret_name",
    default=KubeOptions().secret,
    show_default=True,
    help="Set the name of the Secret of the installation.",
)
@click.option(
    "--timeout",
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Wait this long for the pods of each role.",
)
@with_target
def rotate_seed(
    _target: CliTarget,
    output: Output,
    kubeconfig: str | None,
    context: str | None,
    namespace: str,
    secret_name: str,
    timeout: int,
) -> None:
    """Replace the seed of all tokens; sandboxes keep running and keep their tokens.

    All roles are restarted twice, one pod after the other. If the command is
    interrupted, run it again: it continues.
    """
    kubectl = Kubectl(kubeconfig, context)
    used = SeedRotation(kubectl, namespace, secret_name, timeout).run()
    output.done(f"new sandboxes get tokens of seed {used}", {"seed": used})


@kube.command("render")
@_choices
@click.option(
    "--namespace",
    default="paddock-system",
    show_default=True,
    help="Set the namespace of Paddock.",
)
@with_target
def render(_target: CliTarget, _output: Output, namespace: str, **chosen: Any) -> None:
    """Print the objects that `install` applies, except CRDs and Secrets, as a List.

    The certificate of a webhook is left to cert-manager.
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
    tls_secret: str | None,
    tls_image: str,
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
        tls_secret=tls_secret or "",
        tls_image=tls_image,
    )
