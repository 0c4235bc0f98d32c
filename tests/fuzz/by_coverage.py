"""Coverage-guided fuzzing of one target with atheris, until it fails or the time is up:

    python -m tests.fuzz.by_coverage TARGET [FOUND] [-max_total_time=60 or other of its options]

New inputs go to the directory FOUND, failing ones to the current directory; add both to
`corpus/TARGET` (`branch_*`: inputs that reached a new branch).
"""

import sys
import tempfile

import atheris

# Imported here first: only modules imported in this block are instrumented.
with atheris.instrument_imports(include=["paddock"]):
    from tests.fuzz.targets import CORPUS, TARGETS


def main(program: str, name: str, *options: str) -> None:
    if not options or options[0].startswith("-"):
        options = (tempfile.mkdtemp(prefix="paddock-fuzz-"), *options)
    atheris.Setup([program, *options, str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv)
