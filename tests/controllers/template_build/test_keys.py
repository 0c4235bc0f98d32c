"""Keys of layers: equal for equal work, different for anything that matters."""

from hypothesis import given
from hypothesis import strategies as st

from paddock.controllers.template_build import keys
from paddock.resources.kinds.template import Resources
from paddock.resources.kinds.template_build import BuildStep

STEPS = st.lists(
    st.builds(
        BuildStep,
        type=st.sampled_from(["RUN", "ENV", "COPY", "WORKDIR"]),
        args=st.lists(st.text(max_size=5), max_size=3).map(tuple),
        files_hash=st.sampled_from(["", "a" * 64, "b" * 64]),
    ),
    max_size=6,
)


def step(*args: str, kind: str = "RUN", files: str = "", force: bool = False) -> BuildStep:
    return BuildStep(type=kind, args=args, files_hash=files, force=force)


@given(STEPS, STEPS)
def test_lists_of_steps_share_keys_exactly_as_far_as_they_are_equal(
    one: list[BuildStep], other: list[BuildStep]
) -> None:
    ours, theirs = keys.step_keys("base", one), keys.step_keys("base", other)
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    assert ours[:common] == theirs[:common]
    assert not set(ours[common:]) & set(theirs[common:])


def test_arguments_are_not_confused_with_their_concatenation() -> None:
    assert keys.step_keys("b", [step("a b")]) != keys.step_keys("b", [step("a", "b")])


def test_another_base_changes_every_key() -> None:
    steps = [step("a"), step("b")]
    assert not set(keys.step_keys("one", steps)) & set(keys.step_keys("two", steps))


def test_forcing_a_step_does_not_change_its_key() -> None:
    assert keys.step_keys("b", [step("a")]) == keys.step_keys("b", [step("a", force=True)])


def test_a_forced_step_forces_all_later_ones() -> None:
    steps = [step("a"), step("b", force=True), step("c")]
    assert keys.first_forced(steps, force=False) == 1
    assert keys.first_forced(steps[:1], force=False) == 1
    assert keys.first_forced(steps, force=True) == 0


def test_commands_and_resources_are_part_of_the_result() -> None:
    small, large = Resources(memory="512Mi"), Resources(memory="1Gi")
    found = {
        keys.result_key("last", "", "", small),
        keys.result_key("last", "serve", "", small),
        keys.result_key("last", "", "serve", small),
        keys.result_key("last", "serve", "", large),
    }
    assert len(found) == 4


def test_a_key_fits_in_a_label() -> None:
    assert len(keys.hashed("x" * 10_000)) <= 63


def test_only_variables_that_are_not_expanded_need_no_sandbox() -> None:
    assert not keys.needs_sandbox(step("A", "b c", kind="ENV"))
    assert keys.needs_sandbox(step("A", "$PATH:/x", kind="ENV"))
    assert keys.needs_sandbox(step("true"))
    assert keys.needs_sandbox(step("/srv", kind="WORKDIR"))
