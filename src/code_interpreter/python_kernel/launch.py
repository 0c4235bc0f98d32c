"""Starts the Python kernel: `python launch.py CONNECTION_FILE`.

Code must not see modules of the server: the directory of the package is on the path only while this
module imports.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
sys.path[0] = _ROOT

from code_interpreter.python_kernel.app import main  # noqa: E402

sys.path.remove(_ROOT)

if __name__ == "__main__":
    main(sys.argv[1])
