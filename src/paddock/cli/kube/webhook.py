"""The admission webhook's objects on a cluster, and its certificate.

The certificate is self-signed, created once at install and stored in the Secret `paddock-webhook`;
the webhook configuration contains it. If cert-manager creates and renews it instead, cert-manager
fills in the configuration.
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
"""Name of the Service, and of the Secret with `tls.crt` and `tls.key`."""
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
"""Added to the API's container if the webhook is served."""


def webhook(namespace: str, labels: dict[str, str], ca_bundle: str) -> list[Manifest]:
    """Return the Service of the webhook and its configuration."""
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
                    # Schemas and controllers also validate: allow writes while it is unavailable.
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
                    # Paddock validates its own writes: claims must not wait for the webhook.
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
    """Return the objects with which cert-manager creates and renews the certificate."""
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
    """Create a key and a self-signed certificate; return them as a Secret."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise NotFoundError(
            "openssl, which creates the webhook's certificate, is not installed",
            hint="install openssl, use cert-manager, or install without --webhook",
        )
    with tempfile.TemporaryDirectory() as directory:
        key, cert = Path(directory) / "tls.key", Path(directory) / "tls.crt"
        done = subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "ec", "-nodes", "-days", str(_DAYS)),
                *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", f"/CN={WEBHOOK_NAME}"),
                *("-addext", f"subjectAltName=DNS:{_dns_name(namespace)}"),
                *("-keyout", str(key), "-out", str(cert)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise InvalidError(f"openssl could not create a certificate: {done.stderr.strip()}")
        data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in (cert, key)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": WEBHOOK_NAME, "namespace": namespace, "labels": labels},
        "data": data,
    }
