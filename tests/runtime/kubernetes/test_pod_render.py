"""Rendering of pods, volume claims and NetworkPolicies."""

import json

import pytest

from paddock.kit.errors import InvalidError, UnsupportedError
from paddock.resources.network import destinations
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.network.policy_render import network_policy, policy_name
from paddock.runtime.kubernetes.pods.overlay import merge
from paddock.runtime.kubernetes.pods.render import PodSettings, render, volume_claims
from paddock.runtime.port import Blueprint, EgressPolicy, Limits, Mount

SETTINGS = PodSettings(agent_image="registry.example/paddock:1")


def blueprint(**changes):
    given = {"uid": "u-1", "name": "box", "namespace": "team", "image": "python:3.13", **changes}
    return Blueprint(**given)


def pod(settings=SETTINGS, **changes):
    return render(blueprint(**changes), settings, control_hash="h")


def container(manifest, name):
    spec = manifest.spec
    return next(c for c in (*spec["containers"], *spec["initContainers"]) if c["name"] == name)


def test_a_pod_has_the_owner_and_labels_of_its_sandbox():
    made = pod(labels={"paddock.dev/pool": "base"})
    (owner,) = made.metadata.owner_references
    assert (owner.kind, owner.uid, owner.controller) == ("Sandbox", "u-1", True)
    assert made.metadata.labels[names.LABEL_UID] == "u-1"
    assert made.metadata.labels["paddock.dev/pool"] == "base"
    assert made.key == ("team", "box")


def test_the_main_container_is_not_root_and_has_no_token():
    made = pod()
    assert made.spec["automountServiceAccountToken"] is False
    assert made.spec["shareProcessNamespace"] is True
    assert made.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container(made, "sandbox")["securityContext"]
    assert security["runAsNonRoot"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_sidecar_has_a_config_without_secrets_and_a_readiness_probe():
    made = pod(start_command="serve", ready_command="curl localhost", env={"A": "1"})
    envd = container(made, "envd")
    config = json.loads(envd["env"][0]["value"])
    assert config["start_command"] == "serve"
    assert config["ready_command"] == "curl localhost"
    assert config["control_hash"] == "h"
    assert envd["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert envd["restartPolicy"] == "Always"
    assert "livenessProbe" not in envd, "a frozen pod must not be killed by a probe"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (SETTINGS, lambda made: made.spec["resources"]),
        (
            PodSettings(agent_image="i", has_pod_limits=False),
            lambda made: container(made, "envd")["resources"],
        ),
    ],
)
def test_limits_apply_to_commands_which_are_children_of_envd(settings, where):
    limits = Limits(cpu_millis=1500, memory_bytes=512 << 20)
    found = where(pod(settings, limits=limits))
    assert found["limits"] == {"cpu": "1500m", "memory": str(512 << 20)}
    assert int(found["requests"]["memory"]) <= 512 << 20


def test_dollar_signs_in_variables_are_escaped():
    made = pod(env={"A": "costs $(B)"})
    assert {"name": "A", "value": "costs $$(B)"} in container(made, "sandbox")["env"]


def test_a_pod_template_is_merged_over_the_pod():
    overlay = {
        "metadata": {"labels": {"cost": "r&d"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"pool": "sandboxes"},
            "tolerations": [{"key": "sandboxes", "operator": "Exists"}],
            "runtimeClassName": "gvisor",
            "imagePullSecrets": [{"name": "registry"}],
            "containers": [{"name": "sandbox", "command": ["/app/run"]}, {"name": "proxy"}],
        },
    }
    made = pod(pod_template=overlay)
    assert made.spec["runtimeClassName"] == "gvisor"
    assert made.spec["nodeSelector"] == {"pool": "sandboxes"}
    assert made.spec["tolerations"][0]["key"] == "sandboxes"
    assert made.spec["imagePullSecrets"] == [{"name": "registry"}]
    main = container(made, "sandbox")
    assert main["command"] == ["/app/run"]
    assert main["image"] == "python:3.13", "fields that the overlay does not set are kept"
    assert container(made, "proxy")
    assert made.metadata.labels["cost"] == "r&d"


def test_a_pod_template_cannot_override_the_identity():
    overlay = {"metadata": {"labels": {names.LABEL_UID: "another", names.LABEL_EGRESS: "none"}}}
    made = pod(pod_template=overlay)
    assert made.metadata.labels[names.LABEL_UID] == "u-1"
    assert made.metadata.labels[names.LABEL_EGRESS].startswith("paddock-")


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"hostPID": True}, "spec.hostPID"),
        ({"serviceAccountName": "admin"}, "spec.serviceAccountName"),
        ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken"),
        ({"nodeName": "n"}, "spec.nodeName"),
        ({"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}, "spec.volumes[0].hostPath"),
        (
            {"containers": [{"name": "sandbox", "securityContext": {"privileged": True}}]},
            "spec.containers[0].securityContext.privileged",
        ),
        (
            {"containers": [{"name": "x", "securityContext": {"capabilities": {"add": ["ALL"]}}}]},
            "spec.containers[0].securityContext.capabilities.add",
        ),
        ({"initContainers": [{"name": "envd", "image": "mine"}]}, "spec.initContainers[0].image"),
    ],
)
def test_a_pod_template_cannot_access_the_node(spec, path):
    with pytest.raises(InvalidError) as refused:
        pod(pod_template={"spec": spec})
    assert [problem.path for problem in refused.value.problems] == [f"spec.podTemplate.{path}"]


def test_an_operator_can_allow_access_to_the_node():
    settings = PodSettings(agent_image="i", allow_host=True)
    made = pod(
        settings,
        pod_template={"spec": {"hostNetwork": True}},
        mounts=(Mount(source="/d", path="/m"),),
    )
    assert made.spec["hostNetwork"] is True
    assert {"name": "volume-0", "hostPath": {"path": "/d"}} in made.spec["volumes"]
    with pytest.raises(InvalidError, match="directory of the node"):
        pod(mounts=(Mount(source="/d", path="/m"),))


def test_a_named_volume_is_mounted_from_a_claim():
    made = pod(mounts=(Mount(source="volume:data", path="/data", read_only=True),))
    assert {
        "name": "volume-0",
        "persistentVolumeClaim": {"claimName": "data"},
    } in made.spec["volumes"]
    mounts = container(made, "sandbox")["volumeMounts"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in mounts


def test_volume_claim_templates_become_claims_of_this_sandbox():
    template = {"metadata": {"name": "home"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    wanted = blueprint(volume_claim_templates=(template,))
    (claim,) = volume_claims(wanted)
    assert claim.metadata.name == "home-box"
    assert claim.metadata.owner_references[0].uid == "u-1"
    made = render(wanted, SETTINGS, control_hash="h")
    mounts = container(made, "sandbox")["volumeMounts"]
    assert {"name": "home", "mountPath": "/home/user"} in mounts


def test_merging_replaces_removes_and_keys_lists_by_name():
    base = {"a": {"b": 1, "c": 2}, "env": [{"name": "x", "value": "1"}], "list": [1]}
    over = {"a": {"c": None}, "env": [{"name": "x", "value": "2"}, {"name": "y"}], "list": [2]}
    assert merge(base, over) == {
        "a": {"b": 1},
        "env": [{"name": "x", "value": "2"}, {"name": "y"}],
        "list": [2],
    }


def test_equal_egress_policies_share_one_networkpolicy():
    one, two = EgressPolicy(deny_out=("1.2.3.0/24",)), EgressPolicy(deny_out=("1.2.3.0/24",))
    assert policy_name(one, "s") == policy_name(two, "s")
    assert policy_name(one, "s") != policy_name(EgressPolicy(), "s")


def test_private_ranges_are_denied_by_default():
    made = network_policy(EgressPolicy(), "team", system_namespace="paddock-system")
    blocks = [to["ipBlock"] for to in made.spec["egress"][-1]["to"]]
    private = {str(one) for one in (*destinations.PRIVATE, *destinations.LINK_LOCAL)}
    excepted = {*blocks[0]["except"], *blocks[1]["except"]}
    assert private - excepted == {"::1/128"}
    assert "::/96" in excepted  # contains it
    # NAT64 and 6to4 gateways must not lead to private IPv4 addresses either.
    assert {"64:ff9b::a00:0/104", "64:ff9b::a9fe:0/112", "2002:a00::/24"} <= set(
        blocks[1]["except"]
    )
    assert made.spec["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "paddock-system"
    }
    open_one = network_policy(EgressPolicy(allow_private=True), "team", system_namespace="s")
    assert "except" not in open_one.spec["egress"][-1]["to"][0]["ipBlock"]


def test_without_internet_only_allowed_addresses_are_reachable():
    policy = EgressPolicy(allow_internet=False, allow_out=("8.8.8.8",))
    made = network_policy(policy, "team", system_namespace="s")
    assert made.spec["egress"][1:] == [{"to": [{"ipBlock": {"cidr": "8.8.8.8/32"}}]}]


def test_a_host_name_is_rejected():
    policy = EgressPolicy(allow_internet=False, allow_out=("example.com",))
    with pytest.raises(UnsupportedError, match="addresses only"):
        network_policy(policy, "team", system_namespace="s")


@pytest.mark.parametrize(
    ("policy", "cidrs"),
    [
        (EgressPolicy(), ["0.0.0.0/0", "::/0"]),
        (EgressPolicy(deny_out=("0.0.0.0/0",)), []),
        (EgressPolicy(deny_out=("0.0.0.0/0",), allow_out=("1.2.3.4",)), ["1.2.3.4/32"]),
        (EgressPolicy(deny_out=("::/0",)), ["0.0.0.0/0"]),
    ],
)
def test_a_denied_internet_is_closed_for_pods(policy: EgressPolicy, cidrs: list[str]):
    rules = network_policy(policy, "default", system_namespace="paddock-system").spec["egress"]
    peers = [peer["ipBlock"] for rule in rules if "ports" not in rule for peer in rule["to"]]
    assert [peer["cidr"] for peer in peers] == cidrs


def test_an_allowed_network_does_not_open_the_private_ones_within():
    policy = EgressPolicy(allow_internet=False, allow_out=("0.0.0.0/0", "10.1.2.3"))
    rules = network_policy(policy, "default", system_namespace="paddock-system").spec["egress"]
    everything, named = (peer["ipBlock"] for peer in rules[1]["to"])
    assert "10.0.0.0/8" in everything["except"]
    assert named == {"cidr": "10.1.2.3/32"}
