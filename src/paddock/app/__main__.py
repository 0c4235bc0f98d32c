"""Runs one role, or all of them: `python -m paddock.app [--config FILE] ROLE`."""

import argparse
import sys
from pathlib import Path

from paddock.app.roles import registry
from paddock.app.up import output
from paddock.kit.errors import PaddockError
from paddock.settings import load


def main() -> int:
    """Parse the arguments and run the role."""
    parser = argparse.ArgumentParser(prog="paddock.app", description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("role", choices=sorted((*registry.ROLES, "up")))
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line when everything is up"
    )
    parser.add_argument("--detach", action="store_true", help="run in the background")
    given = parser.parse_args()
    try:
        settings = load(file=given.config)
        if given.role == "up":
            return output.up(settings, given.config, as_json=given.json, detach=given.detach)
        registry.run(given.role, settings, on_ready=lambda: None)
    except PaddockError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"\nhint: {error.hint}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
