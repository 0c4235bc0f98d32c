"""Error responses of the API server become the matching errors, with field paths."""

import json
from typing import Any

import pytest

from paddock.kit import errors
from paddock.kit.errors import FieldProblem, InvalidError, RateLimitedError
from paddock.store.kubernetes.statuses import error_from, read, rejects_selector
from tests.store.kubernetes.scripted import status


def translate(body: dict[str, Any]) -> errors.PaddockError:
    return error_from(read(body["code"], json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", errors.InvalidError),
        (401, "Unauthorized", errors.UnauthenticatedError),
        (403, "Forbidden", errors.ForbiddenError),
        (405, "MethodNotAllowed", errors.UnsupportedError),
        (409, "AlreadyExists", errors.AlreadyExistsError),
        (409, "Conflict", errors.ConflictError),
        (410, "Expired", errors.GoneError),
        (413, "RequestEntityTooLarge", errors.TooLargeError),
        (422, "Invalid", errors.InvalidError),
        (429, "TooManyRequests", errors.RateLimitedError),
        (500, "InternalError", errors.UnavailableError),
        (503, "ServiceUnavailable", errors.UnavailableError),
        (504, "Timeout", errors.DeadlineExceededError),
    ],
)
def test_each_error_response_has_its_error(
    code: int, reason: str, expected: type[errors.PaddockError]
) -> None:
    error = translate(status(code, reason, "because"))
    assert type(error) is expected
    assert "because" in error.message


def test_causes_become_field_problems() -> None:
    cause = {"reason": "FieldValueInvalid", "message": "must be positive", "field": "spec.replicas"}
    error = translate(status(422, "Invalid", "SandboxPool is invalid", causes=[cause]))
    assert isinstance(error, InvalidError)
    assert error.problems == (FieldProblem("spec.replicas", "must be positive"),)


def test_strict_validation_errors_become_field_problems() -> None:
    text = 'strict decoding error: unknown field "spec.repliccas", duplicate field "spec.a"'
    error = translate(status(400, "BadRequest", text))
    assert isinstance(error, InvalidError)
    assert error.problems == (
        FieldProblem("spec.repliccas", "unknown field"),
        FieldProblem("spec.a", "duplicate field"),
    )
    assert "CRDs are outdated" in str(error.hint)


def test_a_missing_object_and_a_missing_kind_are_different_errors() -> None:
    missing = translate(status(404, "NotFound", "gone", name="x", kind="sandboxes"))
    assert isinstance(missing, errors.NotFoundError)
    unserved = error_from(read(404, b"404 page not found\n"))
    assert isinstance(unserved, errors.UnsupportedError)
    assert "paddock kube install" in str(unserved.hint)


def test_an_exceeded_quota_is_not_forbidden() -> None:
    error = translate(status(403, "Forbidden", 'is forbidden: exceeded quota: "small"'))
    assert isinstance(error, errors.QuotaExceededError)


def test_a_deleting_namespace_is_a_conflict() -> None:
    cause = {"reason": "NamespaceTerminating", "message": "x", "field": "metadata.namespace"}
    error = translate(status(403, "Forbidden", "it is being terminated", causes=[cause]))
    assert isinstance(error, errors.ConflictError)


def test_an_object_that_etcd_rejects_is_too_large() -> None:
    error = translate(status(500, "InternalError", "etcdserver: request is too large"))
    assert isinstance(error, errors.TooLargeError)


def test_retry_after_is_in_the_error() -> None:
    error = translate(status(429, "TooManyRequests", "busy", retryAfterSeconds=7))
    assert isinstance(error, RateLimitedError)
    assert error.retry_after_seconds == 7


def test_long_server_messages_are_truncated() -> None:
    error = error_from(read(502, b"<html>" + b"x" * 100_000))
    assert len(error.message) < 700


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("field label not supported: spec.paused", True),
        ('"spec.paused" is not a known field selector: only "metadata.name"', True),
        ("unable to parse requirement", False),
    ],
)
def test_a_rejected_field_selector_is_recognised(text: str, expected: bool) -> None:
    assert rejects_selector(InvalidError(text)) is expected
