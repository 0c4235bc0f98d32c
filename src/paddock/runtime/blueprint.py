"""Translates resources (Sandbox, SandboxTemplate) to the types of the Runtime port. Pure."""

from collections.abc import Callable, Mapping

from paddock.resources import quantity
from paddock.resources.kinds.sandbox import LABEL_POOL, Sandbox
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Outbound,
    Resources,
    SandboxTemplateSpec,
    Volume,
)
from paddock.resources.network.effective import effective_network
from paddock.resources.tokens import TokenSeed
from paddock.runtime import rates
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    EgressPolicy,
    Limits,
    Mount,
    OutboundConfig,
)


def blueprint(
    sandbox: Sandbox,
    template: SandboxTemplateSpec,
    seed: TokenSeed,
    *,
    checkpoint_id: str | None,
    ceiling: NetworkPolicy | None = None,
) -> Blueprint:
    """Return the blueprint of a sandbox. `ceiling` is the network policy of its team."""
    metadata, is_own = sandbox.metadata, has_own_image(sandbox, template)
    return Blueprint(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        image=sandbox.spec.image or template.image,
        image_digest="" if is_own else template.image_digest or "",
        image_team=image_team(sandbox, template),
        image_pull_policy=template.image_pull_policy,
        # They are for the image of the template, not for one that a client names.
        image_pull_secrets=() if is_own else template.image_pull_secrets,
        checkpoint_id=checkpoint_id,
        restore_memory=sandbox.spec.restore_memory,
        limits=sandbox_limits(sandbox.spec.resources, template.resources),
        egress=egress(effective_network(sandbox, template.network, ceiling)),
        env=template.env,
        user=template.user,
        workdir=template.workdir,
        start_command=template.start_command,
        ready_command=template.ready_command,
        ready_timeout_seconds=template.ready_timeout_seconds,
        hostname=sandbox.spec.claim.sandbox_id if sandbox.spec.claim else metadata.name,
        mounts=tuple(_mount(volume) for volume in template.volumes),
        privileges=template.privileges.value,
        agent=agent_config(sandbox, template, seed),
        pod_template=template.pod_template,
        volume_claim_templates=template.volume_claim_templates,
        labels=metadata.labels,
        incarnation=sandbox.status.incarnation + 1,
    )


def has_own_image(sandbox: Sandbox, template: SandboxTemplateSpec) -> bool:
    """Whether the sandbox starts from another image than its template has."""
    return sandbox.spec.image is not None and sandbox.spec.image != template.image


def image_team(sandbox: Sandbox, template: SandboxTemplateSpec) -> str:
    """Return the team whose access to private images counts.

    It is the one that offers the template, whose namespace the sandbox is in, also if another team
    uses it. A client that names another image than the template has only its own access.
    """
    if has_own_image(sandbox, template) and sandbox.spec.claim is not None:
        return sandbox.spec.claim.owner
    return sandbox.metadata.namespace


def agent_config(sandbox: Sandbox, template: SandboxTemplateSpec, seed: TokenSeed) -> AgentConfig:
    """Return the configuration of a sandbox's envd."""
    claim = sandbox.spec.claim
    env: Mapping[str, str] = template.env
    if claim is None:
        return AgentConfig(
            env=env,
            default_user=template.user,
            default_workdir=template.workdir,
            outbound=_outbound(template.outbound),
            is_reserved=LABEL_POOL in sandbox.metadata.labels,
        )
    known = claim.access_token_hash
    return AgentConfig(
        access_token=seed.access_token(claim.sandbox_id, known) if known else None,
        env={**env, **claim.env_vars},
        default_user=template.user,
        default_workdir=template.workdir,
        sandbox_id=claim.sandbox_id,
        template_id=claim.template_id,
        outbound=_outbound(template.outbound),
        team=claim.owner,
    )


def sandbox_limits(own: Resources | None, template: Resources) -> Limits:
    """Return the limits of a sandbox; its own rates are at most those of its template."""
    return limits(template) if own is None else rates.capped(limits(own), limits(template))


def limits(resources: Resources) -> Limits:
    """Parse the quantities of `resources`."""
    return Limits(
        cpu_millis=_read(quantity.millis, resources.cpu, "cpu"),
        memory_bytes=_read(quantity.whole, resources.memory, "memory"),
        disk_bytes=_read(quantity.whole, resources.disk, "disk"),
        pids=resources.pids,
        ingress_bandwidth=_read(quantity.whole, resources.ingress_bandwidth, "ingressBandwidth"),
        egress_bandwidth=_read(quantity.whole, resources.egress_bandwidth, "egressBandwidth"),
        io_read_bandwidth=_read(quantity.whole, resources.io_read_bandwidth, "ioReadBandwidth"),
        io_write_bandwidth=_read(quantity.whole, resources.io_write_bandwidth, "ioWriteBandwidth"),
        io_read_iops=resources.io_read_iops,
        io_write_iops=resources.io_write_iops,
    )


def _read(reader: Callable[[str, str], int], text: str | None, name: str) -> int | None:
    return None if text is None else reader(text, f"spec.resources.{name}")


def egress(network: NetworkPolicy) -> EgressPolicy:
    """Return the egress part of a policy; the gateway applies the ingress part."""
    return EgressPolicy(
        allow_internet=network.allow_internet_access,
        allow_out=network.allow_out,
        deny_out=network.deny_out,
        dns_servers=network.dns_servers,
        allow_private=network.allow_private_networks,
    )


def _outbound(own: Outbound | None) -> OutboundConfig:
    if own is None:
        return OutboundConfig()
    return OutboundConfig(
        http_proxy=own.http_proxy,
        https_proxy=own.https_proxy,
        no_proxy=own.no_proxy,
        ca_certificates=own.ca_certificates,
        pip_index=own.pip_index,
        npm_registry=own.npm_registry,
        apt_mirror=own.apt_mirror,
    )


def _mount(volume: Volume) -> Mount:
    source = volume.host_path or f"volume:{volume.claim_name or volume.name}"
    return Mount(source=source, path=volume.mount_path, read_only=volume.read_only)
