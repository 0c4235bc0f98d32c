"""Moving code objects together."""

from collections.abc import Callable

from paddock.envd.zygote import cow_layout

_PAGE = 4096


def make_functions(count: int) -> dict[str, Callable[[int], int]]:
    """Return functions whose code is scattered: each after a hundred unused ones."""
    names: dict[str, Callable[[int], int]] = {}
    for number in range(count):
        body = f"(x):\n    return sum(y + {number} for y in range(x))\n"
        unused = "".join(f"def unused{number}_{n}{body}" for n in range(100))
        exec(f"def used{number}{body}{unused}", names)
    return names


def pages(functions: list[Callable[[int], int]]) -> set[int]:
    return {id(function.__code__) // _PAGE for function in functions}


def test_used_code_is_moved_together_and_behaves_as_before() -> None:
    # given
    names = make_functions(40)
    used = [function for name, function in names.items() if name.startswith("used")]
    before, results = pages(used), [function(5) for function in used]

    # when
    moved = cow_layout.gather({id(function.__code__) for function in used})

    # then
    assert moved == 40
    assert [function(5) for function in used] == results
    assert len(pages(used)) * 2 < len(before)


def test_nested_code_is_moved() -> None:
    # given: only the inner code is known to be used
    names = make_functions(1)
    function = names["used0"]
    (inner,) = (c for c in function.__code__.co_consts if hasattr(c, "co_code"))

    # when
    moved = cow_layout.gather({id(inner)})

    # then
    assert moved == 1
    assert inner not in [c for c in function.__code__.co_consts if c is inner]
    assert function(3) == 3


def test_unused_code_is_not_moved() -> None:
    function = make_functions(1)["unused0_7"]
    code = function.__code__

    assert cow_layout.gather(set()) == 0
    assert function.__code__ is code
