"""What each runtime cannot do is refused, with the path, the reason and the alternative."""

from typing import Any, get_args

import msgspec
import pytest

from paddock.kit.errors import InvalidError
from paddock.resources import codec
from paddock.resources.kinds.template import (
    NetworkPolicy,
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.meta import Resource, ResourcePart
from paddock.resources.registry import BY_KIND
from paddock.runtime import support
from paddock.runtime.support import KUBERNETES, LOCAL, TEMPLATES, problems, support_check

CLAIMED = {"volumes": [{"name": "v", "mountPath": "/v", "claimName": "data"}]}
TEMPLATED = {
    "volumes": [{"name": "v", "mountPath": "/v"}],
    "volumeClaimTemplates": [{"metadata": {"name": "v"}}],
}
DOMAIN = {"allowInternetAccess": False, "allowOut": ["10.0.0.1", "pypi.org"]}
REFUSED = [
    (LOCAL, CLAIMED, "volumes[0].claimName", "hostPath"),
    (LOCAL, TEMPLATED, "volumeClaimTemplates", "hostPath"),
    (LOCAL, {"podTemplate": {"spec": {}}}, "podTemplate", "other fields"),
    (KUBERNETES, {"pauseStrategy": "Hibernate"}, "pauseStrategy", "use Freeze"),
    (KUBERNETES, {"pauseStrategy": "Stop"}, "pauseStrategy", "volumeClaimTemplates"),
    (KUBERNETES, {"network": DOMAIN}, "network.allowOut[1]", "CIDRs"),
    (KUBERNETES, {"restoreFrom": "cp"}, "restoreFrom", "use an image"),
    (KUBERNETES, {"resources": {"ioReadIops": 5}}, "resources.ioReadIops", "podTemplate"),
]


def made(kind: str, spec: dict[str, Any]) -> Any:
    document = {"metadata": {"name": "x", "namespace": "default"}, "spec": spec}
    return codec.from_builtins(BY_KIND[kind].cls, document)


def _structs(annotation: Any) -> list[type]:
    """Return the structs that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [found for part in get_args(annotation) for found in _structs(part)]


def _spec_of(cls: type) -> type:
    return next(
        (item.type for item in msgspec.structs.fields(cls) if item.name == "spec"), msgspec.Struct
    )


@pytest.mark.parametrize(("runtime", "spec", "path", "alternative"), REFUSED)
@pytest.mark.parametrize("kind", ["SandboxTemplate", "Sandbox", "SandboxPool", "BatchSandbox"])
def test_a_template_that_a_runtime_cannot_honour_is_refused(
    kind: str, runtime: str, spec: dict[str, Any], path: str, alternative: str
) -> None:
    inline = kind != "SandboxTemplate"
    obj = made(kind, {"template": spec} if inline else spec)
    [problem] = problems(runtime, obj)
    assert problem.path == ("spec.template." if inline else "spec.") + path
    assert "; " in problem.message
    assert alternative in problem.message
    other = KUBERNETES if runtime == LOCAL else LOCAL
    assert problems(other, obj) == []
    # An update is not refused for what it does not change.
    assert problems(runtime, obj, obj) == []


@pytest.mark.parametrize(("runtime", "spec", "path", "alternative"), REFUSED)
def test_a_member_of_an_environment_is_checked_by_its_own_cluster(
    runtime: str, spec: dict[str, Any], path: str, alternative: str
) -> None:
    pool = {"spec": {"template": spec, "replicas": 1}}
    obj = made(
        "SandboxEnv",
        {"templateRef": {"name": "t"}, "clusters": {"here": {"members": {"m": pool}}}},
    )
    [problem] = problems(runtime, obj, cluster="here")
    assert problem.path == f"spec.clusters[here].members[m].spec.template.{path}"
    assert alternative in problem.message
    assert problems(runtime, obj, cluster="there") == []
    assert problems(runtime, obj, obj, cluster="here") == []


@pytest.mark.parametrize(("runtime", "spec", "path", "alternative"), REFUSED)
def test_a_patch_of_a_shard_is_checked(
    runtime: str, spec: dict[str, Any], path: str, alternative: str
) -> None:
    patches = [{"env": {"A": "1"}}, spec]
    obj = made("BatchSandbox", {"template": {}, "shardPatches": patches})
    [problem] = problems(runtime, obj)
    assert problem.path == f"spec.shardPatches[1].{path}"
    assert alternative in problem.message
    assert problems(runtime, obj, obj) == []
    # What the template has is reported once, at the template.
    both = made("BatchSandbox", {"template": spec, "shardPatches": [{"user": "root"}, spec]})
    assert [item.path for item in problems(runtime, both)] == [f"spec.template.{path}"]


def test_a_patch_that_takes_something_away_is_checked() -> None:
    template = TEMPLATED | {"pauseStrategy": "Stop"}
    patch = {"volumeClaimTemplates": None}
    obj = made("BatchSandbox", {"template": template, "shardPatches": [patch]})
    assert [item.path for item in problems(KUBERNETES, obj)] == [
        "spec.shardPatches[0].pauseStrategy"
    ]


def test_a_patch_cannot_mount_a_directory_that_the_operator_does_not_allow() -> None:
    volume = {"name": "v", "mountPath": "/v", "hostPath": "/etc"}
    obj = made("BatchSandbox", {"template": {}, "shardPatches": [{"volumes": [volume]}]})
    [problem] = problems(LOCAL, obj, allowed_paths=("/srv",))
    assert problem.path == "spec.shardPatches[0].volumes[0].hostPath"
    assert problems(LOCAL, obj, allowed_paths=("/etc",)) == []


def test_a_patch_that_cannot_be_merged_is_left_to_the_status_of_the_batch() -> None:
    obj = made("BatchSandbox", {"template": {}, "shardPatches": [{"podTemplate": 5}]})
    assert problems(LOCAL, obj) == []


def test_what_members_of_an_environment_change_is_checked() -> None:
    env = {
        "templateRef": {"name": "t"},
        "overrides": {"networkPolicy": DOMAIN},
        "clusters": {
            "here": {"members": {"m": {"config": {"inlineResources": {"ioReadIops": 5}}}}}
        },
    }
    obj = made("SandboxEnv", env)
    assert {item.path for item in problems(KUBERNETES, obj, cluster="here")} == {
        "spec.overrides.networkPolicy.allowOut[1]",
        "spec.clusters[here].members[m].config.inlineResources.ioReadIops",
    }
    assert problems(KUBERNETES, obj, obj) == []
    assert problems(LOCAL, obj) == []


def test_every_kind_that_holds_a_template_is_checked() -> None:
    """A field of another kind, or a new one, would be applied unchecked."""
    parts = (SandboxTemplateSpec, NetworkPolicy, Resources)

    def found(cls: type, path: str) -> set[str]:
        fields = set[str]()
        for field in msgspec.structs.fields(cls):
            for name in _structs(field.type):
                here = f"{path}.{field.encode_name}"
                if name in parts:
                    fields.add(here)
                elif issubclass(name, Resource | ResourcePart):
                    fields |= found(name, here)
        return fields

    assert {
        path
        for info in BY_KIND.values()
        if info.cls is not SandboxTemplate
        for path in found(_spec_of(info.cls), info.cls.KIND)
    } == {
        "BatchSandbox.template",
        "Sandbox.network",
        "Sandbox.resources",
        "Sandbox.template",
        "SandboxEnv.clusters.members.config.inlineResources",
        "SandboxEnv.clusters.members.spec.template",
        "SandboxEnv.overrides.networkPolicy",
        "SandboxPool.template",
        # One machine alone builds templates, and honours every size.
        "TemplateBuild.resources",
    }


def test_every_restriction_of_the_table_is_tested() -> None:
    specs = [(runtime, made("SandboxTemplate", spec).spec) for runtime, spec, _, _ in REFUSED]
    for runtime, restrictions in TEMPLATES.items():
        for item in restrictions:
            assert any(place == runtime and list(item.uses(spec)) for place, spec in specs)


def test_pods_have_no_snapshots_and_no_hibernation() -> None:
    for kind, spec, path in (
        ("Checkpoint", {"sandboxName": "x"}, "spec"),
        ("TemplateBuild", {"templateName": "x"}, "spec"),
        ("Sandbox", {"restoreFrom": "cp"}, "spec.restoreFrom"),
        ("Sandbox", {"pauseStrategy": "Hibernate"}, "spec.pauseStrategy"),
        ("Sandbox", {"network": DOMAIN}, "spec.network.allowOut[1]"),
        ("Sandbox", {"resources": {"ioReadIops": 5}}, "spec.resources.ioReadIops"),
    ):
        obj = made(kind, spec)
        assert [item.path for item in problems(KUBERNETES, obj)] == [path]
        assert problems(KUBERNETES, obj, obj) == []
        assert problems(LOCAL, obj) == []


def test_one_machine_changes_neither_image_nor_size_in_place() -> None:
    old = made("Sandbox", {"template": {}})
    for field, value in (("image", "other"), ("resources", {"cpu": "1"})):
        new = made("Sandbox", {"template": {}, field: value})
        assert [item.path for item in problems(LOCAL, new, old)] == [f"spec.{field}"]
        assert problems(LOCAL, new) == []
        assert problems(KUBERNETES, new, old) == []


def test_a_refusal_names_the_object_the_runtime_and_every_field() -> None:
    obj = made("SandboxTemplate", CLAIMED | {"podTemplate": {}})
    with pytest.raises(InvalidError) as refused:
        support_check(LOCAL)(None, obj)
    assert "SandboxTemplate 'x' cannot run on the runtime 'local'" in refused.value.message
    assert len(refused.value.problems) == 2
    assert support_check("simulated")(None, obj) == ()


def test_the_policy_of_a_request_is_checked() -> None:
    policy = NetworkPolicy(allow_internet_access=False, allow_out=("pypi.org",))
    support.check_network(LOCAL, policy)
    with pytest.raises(InvalidError, match=r"network\.allowOut\[0\]: .* use addresses"):
        support.check_network(KUBERNETES, policy)
