"""Packages that the first Python kernel loads at its start.

Its memory is stored with the template, so that no sandbox waits for them.
"""

import importlib
import io
import logging

log = logging.getLogger(__name__)

PACKAGES = ("numpy", "pandas", "matplotlib.pyplot", "e2b_charts")


def load() -> None:
    """Import what is installed, and draw once: that builds the list of fonts."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as problem:
            log.info("not loaded: %s", problem)
            return
    from matplotlib import pyplot

    figure = pyplot.figure()
    figure.gca().plot([0, 1])
    figure.savefig(io.BytesIO())
    pyplot.close(figure)
