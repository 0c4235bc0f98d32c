"""Code that sets variables of the environment, in each language.

Names and values come from callers: each is written as a literal of the language, never pasted.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping

Variables = Mapping[str, str | None]
"""Variables to set; None removes one."""
SetVariables = Callable[[Variables], str]
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def python(variables: Variables) -> str:
    """Set variables in Python."""
    kept, removed = _split(variables)
    lines = [f"__import__('os').environ[{name!r}] = {value!r}" for name, value in kept.items()]
    lines += [f"__import__('os').environ.pop({name!r}, None)" for name in removed]
    # The value of the last expression would be displayed.
    return "".join(f"{line};\n" for line in lines)


def javascript(variables: Variables) -> str:
    """Set variables in JavaScript and TypeScript."""
    kept, removed = _split(variables)
    lines = [f"process.env[{json.dumps(name)}] = {json.dumps(kept[name])};" for name in kept]
    lines += [f"delete process.env[{json.dumps(name)}];" for name in removed]
    return "{" + " ".join(lines) + "}"


def bash(variables: Variables) -> str:
    """Set variables in bash. It has no variables with names that are not identifiers."""
    kept, removed = _split(variables)
    lines = [f"export {name}={shlex.quote(kept[name])}" for name in kept if _is_identifier(name)]
    lines += [f"unset {name}" for name in removed if _is_identifier(name)]
    return "\n".join(lines)


def r(variables: Variables) -> str:
    """Set variables in R."""
    kept, removed = _split(variables)
    lines: list[str] = []
    if kept:
        values = ", ".join(_r_text(value) for value in kept.values())
        names = ", ".join(_r_text(name) for name in kept)
        lines.append(f"do.call(Sys.setenv, setNames(list({values}), c({names})))")
    if removed:
        lines.append(f"Sys.unsetenv(c({', '.join(_r_text(name) for name in removed)}))")
    return "invisible({" + "; ".join(lines) + "})"


def java(variables: Variables) -> str:
    """Set system properties in Java, whose environment cannot be changed."""
    kept, removed = _split(variables)
    lines = [f"System.setProperty({json.dumps(name)}, {json.dumps(kept[name])});" for name in kept]
    lines += [f"System.clearProperty({json.dumps(name)});" for name in removed]
    return "\n".join(lines)


def _is_identifier(name: str) -> bool:
    return _SHELL_NAME.fullmatch(name) is not None


def _r_text(text: str) -> str:
    # R has no surrogate pairs, which JSON uses to escape.
    return json.dumps(text, ensure_ascii=False)


def _split(variables: Variables) -> tuple[dict[str, str], list[str]]:
    kept = {name: value for name, value in variables.items() if value is not None}
    return kept, [name for name, value in variables.items() if value is None]
