"""Run envd by itself: `python -m paddock.envd --port 49983` or `--socket PATH`.

For pods (entered with nsenter), for the host mode of tasks and for manual tests. Commands are
forked by envd. On a node envds are forked by the zygote instead.
"""

import argparse
import asyncio
import os
import socket

import msgspec

from paddock.envd import logs
from paddock.envd.config import Config
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.server import Envd


def _listen(options: argparse.Namespace) -> socket.socket:
    if options.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(options.socket)
    else:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    listener.listen(1024)
    return listener


async def _serve(config: Config, listener: socket.socket) -> None:
    envd = Envd(config, DirectSpawner())
    await envd.start(listener)
    try:
        await envd.run_until_idle()
    finally:
        envd.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m paddock.envd", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=49983)
    parser.add_argument("--socket", help="listen on this unix socket instead of a port")
    parser.add_argument(
        "--config", help="read the configuration from this JSON file (default: none)"
    )
    options = parser.parse_args(arguments)
    logs.configure("%(levelname)s:%(name)s:%(message)s")
    config = Config()
    if options.config:
        with open(options.config, "rb") as file:
            config = msgspec.json.decode(file.read(), type=Config)
    os.umask(0o022)
    try:
        asyncio.run(_serve(config, _listen(options)))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
