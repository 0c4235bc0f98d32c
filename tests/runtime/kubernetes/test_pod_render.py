"""What a sandbox's pod looks like: `render` is a pure function of the blueprint."""

import json

import pytest

from paddock.kit.errors import InvalidError, UnsupportedError
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


def test_it_belongs_to_its_sandbox_and_says_so():
    made = pod(labels={"paddock.dev/pool": "base"})
    (owner,) = made.metadata.owner_references
    assert (owner.kind, owner.uid, owner.controller) == ("Sandbox", "u-1", True)
    assert made.metadata.labels[names.LABEL_UID] == "u-1"
    assert made.metadata.labels["paddock.dev/pool"] == "base"
    assert made.key == ("team", "box")


def test_nothing_inside_is_root_or_holds_a_token():
    made = pod()
    assert made.spec["automountServiceAccountToken"] is False
    assert made.spec["shareProcessNamespace"] is True
    assert made.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container(made, "sandbox")["securityContext"]
    assert security["runAsNonRoot"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_sidecar_has_orders_without_secrets_and_answers_for_readiness():
    made = pod(start_command="serve", ready_command="curl localhost", env={"A": "1"})
    envd = container(made, "envd")
    orders = json.loads(envd["env"][0]["value"])
    assert orders["start_command"] == "serve"
    assert orders["ready_command"] == "curl localhost"
    assert orders["control_hash"] == "h"
    assert envd["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert envd["restartPolicy"] == "Always"
    assert "livenessProbe" not in envd, "a frozen pod must not be killed for being silent"


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
def test_limits_hold_for_commands_which_are_envds_children(settings, where):
    limits = Limits(cpu_millis=1500, memory_bytes=512 << 20)
    found = where(pod(settings, limits=limits))
    assert found["limits"] == {"cpu": "1500m", "memory": str(512 << 20)}
    assert int(found["requests"]["memory"]) <= 512 << 20


def test_variables_are_taken_literally():
    made = pod(env={"A": "costs $(B)"})
    assert {"name": "A", "value": "costs $$(B)"} in container(made, "sandbox")["env"]


def test_a_podtemplate_is_merged_over_it():
    wishes = {
        "metadata": {"labels": {"cost": "r&d"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"pool": "sandboxes"},
            "tolerations": [{"key": "sandboxes", "operator": "Exists"}],
            "runtimeClassName": "gvisor",
            "imagePullSecrets": [{"name": "registry"}],
            "containers": [{"name": "sandbox", "command": ["/app/run"]}, {"name": "proxy"}],
        },
    }
    made = pod(pod_template=wishes)
    assert made.spec["runtimeClassName"] == "gvisor"
    assert made.spec["nodeSelector"] == {"pool": "sandboxes"}
    assert made.spec["tolerations"][0]["key"] == "sandboxes"
    assert made.spec["imagePullSecrets"] == [{"name": "registry"}]
    main = container(made, "sandbox")
    assert main["command"] == ["/app/run"]
    assert main["image"] == "python:3.13", "what the wishes leave out stays"
    assert container(made, "proxy")
    assert made.metadata.labels["cost"] == "r&d"


def test_identity_cannot_be_overridden():
    wishes = {"metadata": {"labels": {names.LABEL_UID: "another", names.LABEL_EGRESS: "none"}}}
    made = pod(pod_template=wishes)
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
def test_a_podtemplate_cannot_reach_beyond_the_pod(spec, path):
    with pytest.raises(InvalidError) as refused:
        pod(pod_template={"spec": spec})
    assert [problem.path for problem in refused.value.problems] == [f"spec.podTemplate.{path}"]


def test_an_operator_may_open_the_host():
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


def test_a_named_volume_is_a_claim():
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


def test_an_egress_policy_denies_private_ranges_unless_told():
    made = network_policy(EgressPolicy(), "team", system_namespace="paddock-system")
    blocks = [to["ipBlock"] for to in made.spec["egress"][-1]["to"]]
    assert "10.0.0.0/8" in blocks[0]["except"]
    assert made.spec["ingress"][0]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "paddock-system"
    }
    open_one = network_policy(EgressPolicy(allow_private=True), "team", system_namespace="s")
    assert "except" not in open_one.spec["egress"][-1]["to"][0]["ipBlock"]


def test_without_internet_only_what_is_named_can_be_reached():
    policy = EgressPolicy(allow_internet=False, allow_out=("8.8.8.8",))
    made = network_policy(policy, "team", system_namespace="s")
    assert made.spec["egress"][1:] == [{"to": [{"ipBlock": {"cidr": "8.8.8.8/32"}}]}]


def test_a_host_name_is_refused_not_ignored():
    policy = EgressPolicy(allow_internet=False, allow_out=("example.com",))
    with pytest.raises(UnsupportedError, match="addresses only"):
        network_policy(policy, "team", system_namespace="s")
