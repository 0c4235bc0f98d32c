"""The admission webhook's objects on a cluster, and the certificate by which it is believed.

The certificate is its own authority: made once at install, kept in the Secret `paddock-webhook`,
named in the configuration. Where cert-manager is to make and renew it instead, the configuration
is left empty for it to fill in.
"""

import base64
import shutil
import subprocess
import tempfile
from pathlib import Path

from paddock.cli.kube.options import Manifest
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.registry import KINDS

WEBHOOK_PORT = 3003
WEBHOOK_NAME = "paddock-webhook"
"""Of the Service, and of the Secret with `tls.crt` and `tls.key`."""
_DIRECTORY = "/etc/paddock/webhook"
_DAYS = 3650
WEBHOOK_VOLUME: Manifest = {"name": "webhook", "secret": {"secretName": WEBHOOK_NAME}}
WEBHOOK_CONTAINER: dict[str, list[Manifest]] = {
    "env": [
        {"name": "PADDOCK_WEBHOOK_CERTIFICATE", "value": f"{_DIRECTORY}/tls.crt"},
        {"name": "PADDOCK_WEBHOOK_KEY", "value": f"{_DIRECTORY}/tls.key"},
        {"name": "PADDOCK_WEBHOOK_PORT", "value": str(WEBHOOK_PORT)},
    ],
    "ports": [{"name": "webhook", "containerPort": WEBHOOK_PORT}],
    "volumeMounts": [{"name": "webhook", "mountPath": _DIRECTORY, "readOnly": True}],
}
"""What the API's container has more where the webhook is served."""


def webhook(namespace: str, labels: dict[str, str], ca_bundle: str) -> list[Manifest]:
    """Give the Service by which the cluster reaches the webhook, and what it is asked about."""
    accounts = [f"'system:serviceaccount:{namespace}:paddock-{r}'" for r in ("api", "controllers")]
    client: Manifest = {
        "service": {
            "namespace": namespace,
            "name": WEBHOOK_NAME,
            "path": "/validate",
            "port": 443,
        }
    }
    metadata: Manifest = {"name": "paddock", "labels": labels}
    if ca_bundle:
        client["caBundle"] = ca_bundle
    else:
        metadata["annotations"] = {"cert-manager.io/inject-ca-from": f"{namespace}/{WEBHOOK_NAME}"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": WEBHOOK_NAME, "namespace": namespace, "labels": labels},
            "spec": {
                "selector": labels,
                "ports": [{"name": "webhook", "port": 443, "targetPort": WEBHOOK_PORT}],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": metadata,
            "webhooks": [
                {
                    "name": "validate.paddock.dev",
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    # Schemas and the controllers hold without it: its absence stops nobody.
                    "failurePolicy": "Ignore",
                    "timeoutSeconds": 5,
                    "clientConfig": client,
                    "rules": [
                        {
                            "apiGroups": ["paddock.dev"],
                            "apiVersions": ["v1alpha1"],
                            "operations": ["CREATE", "UPDATE"],
                            "resources": [info.cls.PLURAL for info in KINDS],
                            "scope": "Namespaced",
                        }
                    ],
                    # Paddock checks what it writes itself: claims must not wait for this.
                    "matchConditions": [
                        {
                            "name": "not-paddock-itself",
                            "expression": "!(request.userInfo.username in "
                            f"[{', '.join(accounts)}])",
                        }
                    ],
                }
            ],
        },
    ]


def issued(namespace: str, labels: dict[str, str]) -> list[Manifest]:
    """Give what cert-manager needs to make the certificate and to renew it."""
    group = "cert-manager.io/v1"
    metadata = {"name": WEBHOOK_NAME, "namespace": namespace, "labels": labels}
    return [
        {
            "apiVersion": group,
            "kind": "Issuer",
            "metadata": metadata,
            "spec": {"selfSigned": {}},
        },
        {
            "apiVersion": group,
            "kind": "Certificate",
            "metadata": metadata,
            "spec": {
                "secretName": WEBHOOK_NAME,
                "dnsNames": [_dns_name(namespace)],
                "issuerRef": {"kind": "Issuer", "name": WEBHOOK_NAME},
            },
        },
    ]


def _dns_name(namespace: str) -> str:
    return f"{WEBHOOK_NAME}.{namespace}.svc"


def certificate(namespace: str, labels: dict[str, str]) -> Manifest:
    """Make a key and a certificate that vouches for itself, as the Secret to keep."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NotFoundError(
            "openssl is not installed: it makes the webhook's certificate",
            hint="install it, use cert-manager, or install without --webhook",
        )
    with tempfile.TemporaryDirectory() as directory:
        key, shown = Path(directory) / "tls.key", Path(directory) / "tls.crt"
        done = subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "ec", "-nodes", "-days", str(_DAYS)),
                *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", f"/CN={WEBHOOK_NAME}"),
                *("-addext", f"subjectAltName=DNS:{_dns_name(namespace)}"),
                *("-keyout", str(key), "-out", str(shown)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise InvalidError(f"openssl could not make a certificate: {done.stderr.strip()}")
        data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in (shown, key)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": WEBHOOK_NAME, "namespace": namespace, "labels": labels},
        "data": data,
    }
