"""Variables of the environment as literals: values are never interpreted."""

import json
import subprocess
import sys

import pytest

from code_interpreter.kernels import literals
from code_interpreter.kernels.variables import after_run, before_run, problem

HOSTILE = "a'b\"c\\d\n$(touch x)`id` ${HOME} é😀"


def test_python_gets_exactly_the_value() -> None:
    code = literals.python({"A'": HOSTILE, "GONE": None})
    show = code + "import os, json; print(json.dumps([os.environ[\"A'\"], 'GONE' in os.environ]))"
    out = subprocess.check_output([sys.executable, "-c", show], env={"GONE": "x"})
    assert json.loads(out) == [HOSTILE, False]


def test_bash_gets_exactly_the_value_and_no_names_that_it_cannot_have() -> None:
    code = literals.bash({"A": HOSTILE, "x; touch y": "1", "GONE": None})
    show = f'{code}\nprintf \'%s|%s\' "$A" "${{GONE-unset}}"'
    out = subprocess.check_output(["bash", "-c", show], env={"GONE": "x"})
    assert out.decode() == f"{HOSTILE}|unset"


@pytest.mark.parametrize("language", [literals.javascript, literals.java, literals.r])
def test_other_languages_get_literals(language) -> None:
    code = language({"A": HOSTILE, "GONE": None})
    assert json.dumps(HOSTILE, ensure_ascii=language is not literals.r) in code
    assert '"GONE"' in code


def test_a_run_sets_what_is_new_and_resets_it_afterwards() -> None:
    assert before_run({}, {"S": "1"}, {"R": "2"}) == {"S": "1", "R": "2"}
    assert before_run({"S": "1"}, None, {"S": "3"}) == {"S": "3"}
    assert before_run({"S": "1", "OLD": "x"}, {"S": "2"}, {}) == {"OLD": None, "S": "2"}
    assert after_run({"PATH": "/bin"}, {"S": "1"}, {"S": "3", "PATH": "/x", "R": "2"}) == {
        "S": "1",
        "PATH": "/bin",
        "R": None,
    }


@pytest.mark.parametrize("bad", [{"": "x"}, {"a=b": "x"}, {"a": "\0"}, {"a": "\ud800"}])
def test_variables_that_cannot_be_set_are_refused(bad) -> None:
    assert problem(bad)
    assert problem({"a b": "ü"}) is None
