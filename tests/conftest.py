"""Settings and fixtures of all tests."""

import asyncio
import os
import random
import signal
import tempfile

import hypothesis

from tests import leaks
from tests.cluster.fixtures import kube_cluster, kube_namespace
from tests.fuzz import fuzz_budget

__all__ = ["kube_cluster", "kube_namespace"]

# Without this, the first asynchronous test after a synchronous one makes pytest-asyncio ask for
# "the current loop", which Python 3.11 then creates and nobody closes: a warning, thus a failure,
# in whichever test the collector happens to run.
asyncio.set_event_loop(None)

# A shell that starts a run in the background ignores ^C in it and in all its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files of tests are readable by other users, as with the usual umask.
os.umask(0o022)

# The time of an example depends on the machine's load, not on the property. Every run
# of a commit uses the same examples; other examples are available on request.
for name, is_repeated in (("paddock", True), ("paddock, drawn anew", False)):
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        database=None,
        derandomize=is_repeated,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("paddock")


LONGEST_PLACE = 12
"""Maximum length in bytes: a socket path has 107, and installations use most of them."""


def pytest_configure(config) -> None:
    """Enable the leak check, and use a temporary directory with short paths for sockets."""
    is_worker = hasattr(
        config, "workerinput"
    )  # the worker uses the directory of the leading process
    if not is_worker and len(os.fsencode(tempfile.gettempdir())) > LONGEST_PLACE:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    config.pluginmanager.register(leaks.Watch(config), "leaks")
    _draw_examples(config.option)


def _draw_examples(option) -> None:
    """Use other examples than CI if more of them, or a seed, are requested."""
    fuzz_budget.times = max(option.fuzz_examples, 1)
    if option.hypothesis_seed is None and fuzz_budget.times > 1:
        # Chosen here, so that they can be requested again.
        option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    fuzz_budget.seed = option.hypothesis_seed
    if fuzz_budget.seed is not None:
        # The seed of hypothesis does not affect derandomized runs.
        hypothesis.settings.load_profile("paddock, drawn anew")


def pytest_report_header() -> str | None:
    """Print how to repeat the same examples."""
    if fuzz_budget.seed is None:
        return None
    return f"fuzz: --fuzz-examples={fuzz_budget.times} --hypothesis-seed={fuzz_budget.seed}"


def pytest_addoption(parser) -> None:
    """Duration and intensity of the fault, load and fuzz suites; the defaults suit CI."""
    parser.addoption("--faults-minutes", default="0.4", help="length of the storm of real kills")
    parser.addoption("--faults-kills", default="0", help="real kills, instead of a length")
    parser.addoption("--faults-seeds", default="50", help="seeds of the faults on virtual time")
    parser.addoption("--faults-seed", default="1", help="seed of the choices on real time")
    parser.addoption("--load-minutes", default="0.25", help="length of the churn under load")
    parser.addoption("--load-sandboxes", default="60", help="real sandboxes at once")
    parser.addoption("--interpreters", default="50", help="sandboxes that run code at once")
    parser.addoption("--security-full", action="store_true", help="run attacks in full size")
    parser.addoption("--battery", action="store_true", help="run every attack in all sandboxes")
    parser.addoption("--battery-results", help="append the results of the battery to this file")
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=1,
        help="how many times as many generated inputs; other ones in each run",
    )
