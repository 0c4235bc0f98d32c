"""Runs the server: `python -m code_interpreter`."""

import asyncio
import logging

from code_interpreter.e2b.server import serve
from code_interpreter.settings import Settings


def main() -> None:
    """Serve until the process is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(Settings()))


if __name__ == "__main__":
    main()
