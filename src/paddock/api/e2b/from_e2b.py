"""Conversion of E2B's request bodies to requests of the manager. Pure."""

from msgspec import UNSET

from paddock.api.e2b.extensions import apply_extensions
from paddock.api.e2b.schemas import CreateBody, NetworkConfig
from paddock.claims.requests import NewSandbox
from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.ceiling import PUBLIC_TRAFFIC


def network(config: NetworkConfig | None, internet: bool | None) -> NetworkPolicy | None:
    """Return the network policy of a body; None if the body has none."""
    if config is None and internet is None:
        return None
    shape = config or NetworkConfig()
    if shape.egress_proxy is not None:
        raise UnsupportedError("egress proxies are not supported", hint="use allowOut and denyOut")
    if shape.rules:
        raise UnsupportedError("header rules are not supported", hint="leave network.rules out")
    return NetworkPolicy(
        allow_internet_access=internet is not False,
        allow_out=shape.allow_out,
        deny_out=shape.deny_out,
        dns_servers=shape.dns_servers,
        allow_public_traffic=shape.allow_public_traffic is not False,
        mask_request_host=shape.mask_request_host,
    )


def opens(config: NetworkConfig | None) -> tuple[str, ...]:
    """Return the fields of a create body that ask for something open on purpose.

    `allow_internet_access: true` is not one of them: some clients send it by default.
    """
    return (PUBLIC_TRAFFIC,) if config and config.allow_public_traffic is True else ()


def new_sandbox(
    wanted: CreateBody, *, default_timeout: int, idempotency_key: str = ""
) -> NewSandbox:
    """Return the manager's request for a create body."""
    timeout = default_timeout if wanted.timeout is None else wanted.timeout
    if timeout <= 0:
        raise InvalidError.at("timeout", "a sandbox needs at least one second")
    auto_resume = bool(wanted.auto_resume and wanted.auto_resume.enabled)
    if auto_resume and not wanted.auto_pause:
        raise InvalidError.at(
            "autoResume", "traffic can only wake what is paused at its end: set autoPause"
        )
    if auto_resume and not wanted.auto_pause_memory:
        raise InvalidError.at(
            "autoResume", "needs autoPauseMemory: a pause without memory ends the processes"
        )
    if wanted.iam:
        raise UnsupportedError("iam tokens are not supported", hint="leave iam out")
    if wanted.volume_mounts:
        raise UnsupportedError("volumes are not supported yet", hint="leave volumeMounts out")
    request = NewSandbox(
        template=wanted.template_id,
        timeout_seconds=timeout,
        auto_pause=wanted.auto_pause,
        auto_pause_memory=wanted.auto_pause_memory,
        auto_resume=auto_resume,
        metadata=wanted.metadata or {},
        env_vars=wanted.env_vars or {},
        network=network(wanted.network, wanted.allow_internet_access),
        opens=opens(wanted.network) or UNSET,
        secure=wanted.secure is not False,
        idempotency_key=idempotency_key,
    )
    return apply_extensions(request)
