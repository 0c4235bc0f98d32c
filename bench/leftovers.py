"""Reports leaks of a benchmark suite, one per line; `paddock bench` runs it after each.

    python bench/leftovers.py DIRECTORY SECONDS

The directory was the suite's own for temporary files, and is the mark in the environment of all
that it started. The look is that of the tests: processes, mounts, loop devices, control groups,
links, files. The kernel is given so many seconds to finish. A directory in which nothing is left
is removed.
"""

import shutil
import sys
from pathlib import Path

from tests.leaks import Machine, settled


def main() -> None:
    place, seconds = Path(sys.argv[1]), float(sys.argv[2])
    machine = Machine(place, place)
    for line in settled(machine.left, seconds):
        print(line.removesuffix(", by no test"))
    if machine.is_removable:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
