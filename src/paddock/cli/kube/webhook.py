"""The admission webhook's objects on a cluster, and its certificate.

The certificate is created once at install, with an authority of its own, and stored in the Secret
`paddock-webhook`; the webhook configuration contains the authority. If cert-manager creates and
renews it instead, cert-manager fills in the configuration.
"""

import base64

from paddock.cli.kube.options import Manifest
from paddock.kit import certificates
from paddock.kit.clock import system
from paddock.resources.registry import KINDS

WEBHOOK_PORT = 3003
WEBHOOK_NAME = "paddock-webhook"
"""Name of the Service, and of the Secret with `tls.crt`, `tls.key` and `ca.crt`."""
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
    """Create a key and a certificate with an authority of its own; return them as a Secret."""
    now = system().now()
    authority = certificates.create_authority(WEBHOOK_NAME, now=now)
    pair = certificates.issue(authority, [_dns_name(namespace)], now=now, days=_DAYS)
    files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.certificate}
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": WEBHOOK_NAME, "namespace": namespace, "labels": labels},
        "data": data,
    }
