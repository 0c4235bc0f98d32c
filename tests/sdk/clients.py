"""Runs real clients, each in its own interpreter, and collects their results."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("PADDOCK_CACHE", "/var/cache/paddock")) / "sdk"
SCRIPTS = Path(__file__).with_name("scripts")
LEAVING = SCRIPTS / "leaving.py"
"""Runs a program of a client, which ends without finalizing its interpreter."""
LEAVE = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
"""Ends a script of a client in the same way."""
NEWEST, OLDER = "2.63.0", "2.7.0"
NODE = Path(sys.executable).with_name("node")
NODE_CLIENTS = CACHE / "node"
CLI = NODE_CLIENTS / "node_modules" / "@e2b" / "cli" / "dist" / "index.js"


def python_of(version: str) -> Path:
    python = CACHE / f"e2b-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"E2B's Python SDK {version} is not installed: run scripts/install-clients")
    return python


def checks_of(script: str, *, newest: bool) -> list[str]:
    """Return the names of the checks in a Python script, without running it."""
    tree = ast.parse((SCRIPTS / script).read_text())
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.decorator_list:
            continue
        decorator = node.decorator_list[0]
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(name, ast.Name) and name.id == "check":
            found += [node.name] if newest or not isinstance(decorator, ast.Call) else []
    return found


def javascript_checks(script: str = "javascript.mjs") -> list[str]:
    text = (SCRIPTS / script).read_text()
    found = re.findall(r"^  async (?:'(.+?)'|(\w+))\(\)", text, re.MULTILINE)
    return [quoted or bare for quoted, bare in found]


def results_of(command: list[object], environment: dict[str, str]) -> dict[str, dict]:
    """Run a client; return its result of each check."""
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    output = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"exit status {done.returncode}: {output}"
    return {line["check"]: line for line in lines}
