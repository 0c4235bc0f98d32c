"""JSON decoders of the node are safe at concurrent first use: see docs/decisions/0080."""

import ast
import subprocess
import sys
from pathlib import Path

import paddock.runtime.local

ROOT = Path(paddock.runtime.local.__file__).parent
FIRST_IN_THREADS = """
import sys, threading
from paddock.runtime.local.images.model import decode_manifest

sys.setswitchinterval(1e-6)
begin = threading.Barrier(8)
data = b'{"name": "base:1", "layers": ["/one"], "config": {"env": {"A": "b"}, "user": "u"}}'
found = []

def read():
    begin.wait()
    found.append(decode_manifest(data, origin="base").config.user)

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == ["u"] * 8, found
"""


def test_concurrent_first_reads_do_not_crash():
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_IN_THREADS], capture_output=True, check=False
        )
        assert done.returncode == 0, done


def test_structs_are_decoded_by_decoders_created_at_import():
    """`decode(type=…)` builds the decoder at first use, which is not thread-safe."""
    lazily = [
        f"{module.relative_to(ROOT)}:{call.lineno}"
        for module in ROOT.rglob("*.py")
        for call in ast.walk(ast.parse(module.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "msgspec.json.decode"
        and any(word.arg == "type" and _may_be_struct(word.value) for word in call.keywords)
    ]
    assert not lazily


def _may_be_struct(kind: ast.expr) -> bool:
    return not ast.unparse(kind).startswith("dict[")
