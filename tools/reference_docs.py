"""Generates the reference pages of `docs` from the code; a test fails if they are out of date.

Run `python -m tools.reference_docs --write docs`.
"""

import argparse
import ast
import inspect
import sys
from itertools import pairwise
from pathlib import Path

from msgspec import structs

from paddock import settings as settings_module
from paddock.cli import reference
from paddock.controllers.sandbox.lifecycle import TRANSITIONS
from paddock.resources.kinds.sandbox import Phase
from paddock.settings import PREFIX, Settings


def lifecycle() -> str:
    """Return the page with the state diagram of sandboxes."""
    lines = [
        "# Lifecycle of a sandbox",
        "",
        "Generated from `controllers/sandbox/lifecycle.py`; do not edit.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> Pending",
    ]
    drawn = sorted({(source, target) for (source, _), target in TRANSITIONS.items()})
    for source, target in drawn:
        if target is not Phase.TERMINATING:
            lines.append(f"    {source} --> {target}")
    lines += ["    Terminating --> [*]", "```", "", "| From | When | To |", "|---|---|---|"]
    for (source, trigger), target in TRANSITIONS.items():
        if target is not Phase.TERMINATING:
            lines.append(f"| {source} | {trigger.value} | {target} |")
    lines += [f"| any | {_deleted()} | Terminating |", ""]
    lines += ["[pauses.md](pauses.md) describes pauses that fail, and what cannot be stored.", ""]
    return "\n".join(lines)


def _deleted() -> str:
    return next(
        trigger.value for (_, trigger), target in TRANSITIONS.items() if target is Phase.TERMINATING
    )


def settings() -> str:
    """Return the page with every setting, its default and its meaning."""
    notes = _attribute_docstrings(inspect.getsource(settings_module), "Settings")
    lines = [
        "# Settings",
        "",
        "A TOML file (`paddock --config FILE`), then the environment; later ones win.",
        "Generated from `settings.py`; do not edit.",
        "",
        "| Setting | Environment | Default | Meaning |",
        "|---|---|---|---|",
    ]
    for field in structs.fields(Settings):
        meaning = " ".join(notes.get(field.name, "").split())
        variable = f"{PREFIX}{field.name.upper()}"
        lines.append(f"| `{field.name}` | `{variable}` | `{field.default!r}` | {meaning} |")
    return "\n".join([*lines, ""])


def _attribute_docstrings(source: str, name: str) -> dict[str, str]:
    body = next(
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    found: dict[str, str] = {}
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[node.target.id] = str(following.value.value)
    return found


PAGES = {
    "lifecycle.md": lifecycle,
    "reference/settings.md": settings,
    "reference/cli.md": reference.page,
}


def main() -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    directory: Path = parser.parse_args().write
    for name, render in PAGES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
