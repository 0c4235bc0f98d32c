"""Checks the network policy of a request against those that limit it. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from paddock.claims.caller import Caller
from paddock.kit.errors import FieldProblem, ForbiddenError
from paddock.resources.kinds.template import NetworkPolicy
from paddock.resources.network.ceiling import exceeding
from paddock.resources.network.effective import requested_network


class RequestedNetwork(Struct, frozen=True):
    """The policy that a request gives its sandbox."""

    policy: NetworkPolicy | None = None
    """`None`: that of the template."""
    is_opened: bool = False
    """Whether it may exceed that of the template."""


def requested(
    caller: Caller,
    asked: NetworkPolicy | None,
    opens: Sequence[str],
    *,
    template: NetworkPolicy,
    base: NetworkPolicy | None = None,
    ceiling: NetworkPolicy | None = None,
) -> RequestedNetwork:
    """Return the policy of a request; `ForbiddenError` if it names more than is allowed.

    `base` is the policy that applies if the request has none, by default that of the template.
    `ceiling` is that of team and installation. An operator may exceed the template.
    """
    if asked is None:
        return RequestedNetwork(base)
    if ceiling is not None and (problems := exceeding(asked, ceiling, opens)):
        raise _refusal(problems, "the team or the installation")
    problems = exceeding(asked, template, opens)
    if problems and not caller.is_operator:
        raise _refusal(problems, "the template")
    wanted = requested_network(template if base is None else base, asked, opens)
    return RequestedNetwork(wanted, bool(problems))


def _refusal(problems: Sequence[FieldProblem], whose: str) -> ForbiddenError:
    listed = "; ".join(str(problem) for problem in problems[:10])
    return ForbiddenError(
        f"the network policy of {whose} allows less than the request: {listed}",
        hint="leave the field out, or ask an operator",
    )
