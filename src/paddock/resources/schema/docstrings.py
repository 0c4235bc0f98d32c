"""Docstrings of structs and their fields, for schemas.

Python does not keep the docstrings of attributes, so they are read from the source when a schema is
generated. They are used only for descriptions.
"""

import ast
import inspect
import textwrap
from enum import Enum
from functools import cache
from itertools import pairwise

from msgspec import Struct


def class_docstring(cls: type[Struct] | type[Enum]) -> str:
    """Return the docstring of a class, on one line."""
    return _one_line(cls.__doc__ or "")


@cache
def field_docstrings(cls: type[Struct] | type[Enum]) -> dict[str, str]:
    """Return the docstring of every attribute that has one, including those of base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("paddock."):
            found |= _declared(base)
    return found


def _declared(cls: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for statement, following in pairwise(body):
        name = _target(statement)
        if name and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[name] = _one_line(str(following.value.value))
    return found


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())
