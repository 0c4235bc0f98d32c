"""Writes the results of the battery of attacks into SECURITY.md.

    pytest tests/security/test_battery.py --battery --battery-results /tmp/results.jsonl
    python -m tests.security.battery /tmp/results.jsonl --write SECURITY.md

Without `--write`, the table is printed.
"""

import argparse
import sys
from pathlib import Path

from tests.security.battery import results


def main(argv: list[str]) -> int:
    """Print or write the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the file of --battery-results")
    parser.add_argument("--write", type=Path, help="the page to change")
    given = parser.parse_args(argv)
    table = results.table(results.read(given.results))
    if given.write is None:
        sys.stdout.write(f"{table}\n")
    else:
        given.write.write_text(results.with_table(given.write.read_text(), table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
