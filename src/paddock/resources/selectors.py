"""Label and field selectors, with the syntax of Kubernetes.

app=web,tier!=db,env in (a,b),env notin (c),key,!key          labels
metadata.name=x,status.phase!=Running                         fields
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from paddock.kit.errors import FieldProblem, InvalidError

_KEY = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"[-A-Za-z0-9_.]*"
_SET = re.compile(rf"^\s*({_KEY})\s+(in|notin)\s*\(([^()]*)\)\s*$")
_EQUALITY = re.compile(rf"^\s*({_KEY})\s*(==|=|!=)\s*({_VALUE})\s*$")
_EXISTS = re.compile(rf"^\s*(!?)\s*({_KEY})\s*$")
_FIELD = re.compile(r"[-\w./]+")
_OPERATOR = re.compile("(!=|==|=)")
_SPLIT = re.compile(r",(?![^(]*\))")


class Requirement(Struct, frozen=True):
    """One term: the value is (not) in the set. Without values: the key exists (or not)."""

    key: str
    values: frozenset[str] | None
    negated: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels satisfy this term."""
        value = labels.get(self.key)
        if self.values is None:
            return (value is not None) is not self.negated
        return (value in self.values) is not self.negated


class LabelSelector(Struct, frozen=True):
    """A label selector. All terms must match."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels satisfy every term."""
        return all(item.matches(labels) for item in self.requirements)

    def __str__(self) -> str:
        return ",".join(_render(item) for item in self.requirements)


def _render(item: Requirement) -> str:
    if item.values is None:
        return f"!{item.key}" if item.negated else item.key
    if len(item.values) == 1:
        return f"{item.key}{'!=' if item.negated else '='}{next(iter(item.values))}"
    word = "notin" if item.negated else "in"
    return f"{item.key} {word} ({','.join(sorted(item.values))})"


def parse_labels(text: str) -> LabelSelector:
    """Parse a label selector. Raise `InvalidError` that quotes an invalid term."""
    if not text.strip():
        return LabelSelector()
    return LabelSelector(tuple(_label_term(term) for term in _SPLIT.split(text)))


def _label_term(term: str) -> Requirement:
    if match := _SET.match(term):
        values = frozenset(value.strip() for value in match[3].split(","))
        if all(re.fullmatch(_VALUE, value) for value in values):
            return Requirement(match[1], values, match[2] == "notin")
    if match := _EQUALITY.match(term):
        return Requirement(match[1], frozenset((match[3],)), match[2] == "!=")
    if match := _EXISTS.match(term):
        return Requirement(match[2], None, match[1] == "!")
    problem = FieldProblem("labelSelector", f"invalid term {term.strip()!r}")
    raise InvalidError(str(problem), problems=[problem])


class FieldTerm(Struct, frozen=True):
    """One term: a field equals (or differs from) a value."""

    path: tuple[str, ...]
    value: str
    negated: bool = False
    or_absent: bool = False
    """Whether an absent field matches, too. Only the server makes such terms."""


class FieldSelector(Struct, frozen=True):
    """A field selector. All terms must match. Objects are tested in `paddock.store.selection`."""

    terms: tuple[FieldTerm, ...] = ()

    def __str__(self) -> str:
        return ",".join(map(_render_field, self.terms))


def _render_field(term: FieldTerm) -> str:
    # `=` before a value that begins with `=` would be parsed as `==`.
    equal = "==" if term.value.startswith("=") else "="
    return f"{'.'.join(term.path)}{'!=' if term.negated else equal}{term.value}"


def parse_fields(text: str) -> FieldSelector:
    """Parse a field selector. Raise `InvalidError` that quotes an invalid term."""
    if not text.strip():
        return FieldSelector()
    terms: list[FieldTerm] = []
    for term in text.split(","):
        path, operator, value = _field_parts(term)
        terms.append(FieldTerm(tuple(path.split(".")), value, operator == "!="))
    return FieldSelector(tuple(terms))


def _field_parts(term: str) -> tuple[str, str, str]:
    path, operator, value = (*_OPERATOR.split(term, 1), "", "")[:3]
    if operator and _FIELD.fullmatch(path.strip()):
        return path.strip(), operator, value.strip()
    problem = FieldProblem("fieldSelector", f"invalid term {term.strip()!r}")
    raise InvalidError(str(problem), problems=[problem])
