"""Bodies of requests."""

import pytest

from code_interpreter.e2b.requests import BadRequestError, parse_context, parse_execute


def test_nulls_are_what_is_not_given() -> None:
    body = b'{"code": "1", "context_id": null, "language": null, "env_vars": null}'
    parsed = parse_execute(body)
    assert (parsed.code, parsed.context_id, parsed.language, parsed.env_vars) == (
        "1",
        None,
        None,
        {},
    )
    assert parse_context(b"").language is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "code"),
        (b'{"code": 1}', "code"),
        (b'{"code": "", "context_id": "a", "language": "r"}', "Only one of"),
        (b'{"code": "", "language": 1}', "language"),
        (b'{"code": "", "env_vars": []}', "env_vars"),
        (b'{"code": "", "env_vars": {"A": 1}}', "env_vars"),
        (b'{"code": "", "env_vars": {"A=": "1"}}', "env_vars"),
    ],
)
def test_a_malformed_body_is_refused_with_the_reason(body, problem) -> None:
    with pytest.raises(BadRequestError, match=problem):
        parse_execute(body)
