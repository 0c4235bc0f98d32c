"""A merge patch turns one state into another and contains only changes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paddock.store.kubernetes.bodies import merge_patch

leaf = st.one_of(
    st.booleans(), st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2))
)
name = st.text("abc", min_size=1, max_size=1)
document = st.recursive(
    st.dictionaries(name, leaf, max_size=3),
    lambda inner: st.dictionaries(name, st.one_of(leaf, inner), max_size=3),
    max_leaves=8,
)


def apply(target: Any, patch: Any) -> Any:
    """Apply a merge patch as defined in RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply(result.get(key), value)
    return result


@given(document, document)
def test_applying_the_patch_to_the_old_state_gives_the_new_state(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert apply(old, merge_patch(old, new)) == new


@given(document)
def test_equal_states_give_an_empty_patch(state: dict[str, Any]) -> None:
    assert merge_patch(state, state) == {}


@given(document, document, st.dictionaries(st.just("unknown"), leaf, min_size=1))
def test_unknown_fields_are_kept(
    old: dict[str, Any], new: dict[str, Any], unknown: dict[str, Any]
) -> None:
    assert apply(old | unknown, merge_patch(old, new)) == new | unknown
