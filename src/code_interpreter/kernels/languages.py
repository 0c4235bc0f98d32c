"""The languages, and the kernel of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

from code_interpreter.kernels import literals, reseeding
from code_interpreter.kernels.events import UnknownLanguageError
from code_interpreter.kernels.literals import SetVariables
from code_interpreter.settings import Settings

_PYTHON_KERNEL = Path(__file__).parents[1] / "python_kernel" / "launch.py"
DEFAULT = "python"


@dataclass(frozen=True)
class Language:
    """A language and how its kernel is started."""

    name: str
    command: tuple[str, ...]
    """`{connection}` stands for the connection file of a Jupyter kernel."""
    set_variables: SetVariables
    aliases: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    is_jupyter: bool = True
    is_interrupted_by_message: bool = False
    is_connected_by_tcp: bool = False
    print_mark: str = ""
    """Code that prints `{mark}`, for a kernel that reports the end of a run before its output."""
    loses_output: bool = False
    """Whether the kernel drops what it cannot send at once."""
    reseed: str = ""
    """Code that seeds its random generators again, in a clone."""
    how_to_install: str = ""

    def require_installed(self) -> None:
        """Raise `UnknownLanguageError` if the program of the kernel is not there."""
        if which(self.command[0]) is None:
            how = f": {self.how_to_install}" if self.how_to_install else ""
            raise UnknownLanguageError(f"the kernel of {self.name} is not installed{how}")


def languages(settings: Settings) -> dict[str, Language]:
    """Return the languages by name and alias."""
    deno = (settings.program("deno"), "jupyter", "--kernel", "--conn", "{connection}")
    jars = settings.server / "share" / "jupyter" / "kernels" / "java"
    known = (
        Language(
            DEFAULT,
            (settings.python, str(_PYTHON_KERNEL), "{connection}"),
            literals.python,
            reseed=reseeding.PYTHON,
        ),
        _deno("javascript", "js", deno),
        _deno("typescript", "ts", deno),
        Language(
            "bash",
            ("/bin/bash",),
            literals.bash,
            aliases=("sh",),
            is_jupyter=False,
            reseed=reseeding.BASH,
        ),
        Language(
            "r",
            ("/usr/bin/R", "--slave", "-e", "IRkernel::main()", "--args", "{connection}"),
            literals.r,
            loses_output=True,
            reseed=reseeding.R,
            how_to_install="apt-get install r-base-core r-cran-irkernel",
        ),
        Language(
            "java",
            (
                "/usr/bin/java",
                "-jar",
                str(jars / "jjava-launcher.jar"),
                str(jars / "jjava.jar"),
                "{connection}",
            ),
            literals.java,
            is_interrupted_by_message=True,
            # The Java library has no Unix sockets.
            is_connected_by_tcp=True,
            loses_output=True,
            how_to_install="apt-get install openjdk-17-jdk-headless",
        ),
    )
    return {name: item for item in known for name in (item.name, *item.aliases)}


def _deno(name: str, alias: str, command: tuple[str, ...]) -> Language:
    return Language(
        name,
        command,
        literals.javascript,
        aliases=(alias,),
        environment={"NO_COLOR": "1", "DENO_NO_UPDATE_CHECK": "1"},
        is_interrupted_by_message=True,
        # Its sockets are those of Deno itself, which listens at addresses only.
        is_connected_by_tcp=True,
        print_mark='console.log("{mark}")',
        loses_output=True,
        reseed=reseeding.JAVASCRIPT,
    )
