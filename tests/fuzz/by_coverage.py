"""Fuzzes one reader by coverage, where atheris is installed, until it breaks or its time is over:

    python -m tests.fuzz.by_coverage TARGET [FOUND] [-max_total_time=60 or other of its options]

What is new goes to the directory FOUND, and what broke it to the one where this runs; both belong
into `corpus/TARGET` (`branch_*`: what went where nothing else had gone).
"""

import sys
import tempfile

import atheris

# Before they are imported elsewhere: only what is imported here tells where it was.
with atheris.instrument_imports(include=["paddock"]):
    from tests.fuzz.targets import CORPUS, TARGETS


def main(program: str, name: str, *options: str) -> None:
    if not options or options[0].startswith("-"):
        options = (tempfile.mkdtemp(prefix="paddock-fuzz-"), *options)
    atheris.Setup([program, *options, str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv)
