"""Runs a program, and ends it without finalizing its interpreter: `leaving.py PROGRAM ARGUMENT…`.

The newest client has threads of its own (pyqwest). One that needs the interpreter while it is
finalized aborts the process: SIGABRT, without a message, after the program has done its work.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> int:
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


status = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status & 0xFF)
