"""What the server knows of its sandbox: its variables, and which clone it is."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

log = logging.getLogger(__name__)

_SECONDS = 2.0


class SandboxFacts:
    """Reads the variables of the sandbox from envd, and its generation from a file."""

    def __init__(self, url: str, generation: Path) -> None:
        self._url = url
        self._generation = generation

    def generation(self) -> str:
        """Return what identifies this clone; always the same text if the file is missing."""
        try:
            return self._generation.read_text()
        except OSError:
            return "-"

    async def variables(self, token: str | None) -> Mapping[str, str] | None:
        """Return the variables of the sandbox, or None if envd does not answer."""
        headers = {"X-Access-Token": token} if token else {}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            # One request in the life of a sandbox: no connection is worth keeping.
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url, headers=headers, allow_redirects=False) as answer,
            ):
                answer.raise_for_status()
                fields: Any = json.loads(await answer.read())
            return {str(name): str(value) for name, value in fields.items()}
        except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, OSError) as problem:
            why = str(problem) or type(problem).__name__
            log.info("the variables of the sandbox are not known: %s", why)
            return None
