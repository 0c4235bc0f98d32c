"""Runs one seed of one scenario again and prints its trace.

    python -m tests.faults.replay storm 7 [--trace /tmp/seed-7.txt]
    python -m tests.faults.replay storm 100-400

Ends with the digest of the trace: the same in every run of the same seed and the same code.
"""

import argparse
import logging
import time
from pathlib import Path

from tests.faults.scenarios import SCENARIOS
from tests.faults.virtual import Trace, replayable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("seeds", help="one number, or FIRST-LAST")
    parser.add_argument("--trace", type=Path, help="write every step here")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    first, _, last = options.seeds.partition("-")
    failed: list[int] = []
    for seed in range(int(first), int(last or first) + 1):
        began = time.monotonic()
        trace = Trace()
        try:
            replayable(seed, SCENARIOS[options.scenario], trace)
            said = "holds"
        except Exception as error:
            failed.append(seed)
            said = "\n".join((str(error), *getattr(error, "__notes__", ())))
        print(
            f"seed {seed}: {trace.digest}, {len(trace.lines)} steps in "
            f"{time.monotonic() - began:.1f} s: {said}",
            flush=True,
        )
        if options.trace:
            trace.write(options.trace)
    raise SystemExit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
