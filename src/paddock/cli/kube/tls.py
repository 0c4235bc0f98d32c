"""TLS on a cluster: an Envoy in each gateway's pod, with the certificate of a Secret.

The Secret is the operator's, of type `kubernetes.io/tls`. Envoy loads a renewed certificate without
a restart. With TLS, the Service has port 443 only, and clients cannot reach the plain port.
"""

import json

from paddock.cli.kube.options import KubeOptions, Manifest, meta
from paddock.gateway.envoy_config import TlsListener, certificate_secret, configuration

TLS_PORT = 3443
TLS_NAME = "paddock-tls"
"""Name of the ConfigMap with Envoy's configuration."""
_FRONT_PORT = 3004
_CERTIFICATE = "/etc/paddock/tls"
_CONFIGURATION = "/etc/envoy/paddock"
_LISTENER = TlsListener(
    host="0.0.0.0",  # noqa: S104 - inside a pod
    port=TLS_PORT,
    front_port=_FRONT_PORT,
    certificate=f"{_CERTIFICATE}/tls.crt",
    key=f"{_CERTIFICATE}/tls.key",
    secret_file=f"{_CONFIGURATION}/certificate.json",
)
TLS_ENVIRONMENT: list[Manifest] = [
    {"name": "PADDOCK_TLS_CERTIFICATE", "value": _LISTENER.certificate},
    {"name": "PADDOCK_FRONT_PORT", "value": str(_FRONT_PORT)},
]
"""Added to the gateway's container: it listens on a loopback port for Envoy."""
_PRE_STOP_SECONDS = 8
"""Envoy outlives the gateway, which stops accepting after 5 s and then drains."""


def envoy_files() -> dict[str, str]:
    """Return the files of Envoy's configuration, which contain no secrets."""
    return {
        "envoy.json": json.dumps(configuration(_LISTENER), indent=1) + "\n",
        "certificate.json": json.dumps(certificate_secret(_LISTENER), indent=1) + "\n",
    }


def tls_configuration(options: KubeOptions) -> Manifest:
    """Return the ConfigMap with Envoy's configuration."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta(options, TLS_NAME, "gateway"),
        "data": envoy_files(),
    }


def tls_container(options: KubeOptions) -> Manifest:
    """Return Envoy's container in the pod of a gateway."""
    return {
        "name": "tls",
        "image": options.tls_image,
        "command": [
            *("envoy", "-c", f"{_CONFIGURATION}/envoy.json", "--disable-hot-restart"),
            *("--log-level", "warning", "--concurrency", "2"),
        ],
        "ports": [{"name": "https", "containerPort": TLS_PORT}],
        "readinessProbe": {"tcpSocket": {"port": TLS_PORT}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_SECONDS)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "tls", "mountPath": _CERTIFICATE, "readOnly": True},
            {"name": "tls-configuration", "mountPath": _CONFIGURATION, "readOnly": True},
        ],
    }


def tls_volumes(options: KubeOptions) -> list[Manifest]:
    """Return the volumes of Envoy's container."""
    return [
        {"name": "tls", "secret": {"secretName": options.tls_secret}},
        {"name": "tls-configuration", "configMap": {"name": TLS_NAME}},
    ]
