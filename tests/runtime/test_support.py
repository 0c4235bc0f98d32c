"""What each runtime cannot do is refused, with the path, the reason and the alternative."""

from typing import Any

import pytest

from paddock.kit.errors import InvalidError
from paddock.resources import codec
from paddock.resources.kinds.template import NetworkPolicy
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
