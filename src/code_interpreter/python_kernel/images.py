"""Images of Pillow that code saves to a file or shows are displayed as results.

Pillow is not imported for it: its module is changed when the code imports it.
"""

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "PIL.Image"


def install() -> None:
    """Change Pillow, now or when it is imported."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder())


def change(module: ModuleType) -> None:
    """Display images that are saved by name, and those that are shown."""
    image: Any = getattr(module, "Image")  # noqa: B009
    save = image.save

    @functools.wraps(save)
    def save_and_display(self: Any, fp: Any, *args: Any, **options: Any) -> None:
        save(self, fp, *args, **options)
        # Figures are displayed as such.
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001
        if isinstance(fp, str) and not caller.startswith("matplotlib"):
            _display(self)

    image.save = save_and_display
    # There is no screen for a viewer.
    image.show = lambda self, *_, **__: _display(self)


def _display(image: Any) -> None:
    from IPython.display import display

    display(image)


class _Finder(MetaPathFinder):
    """Changes the module as soon as it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of other finders, with a loader that changes the module."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        spec = next((item for item in others if item is not None), None)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = execute_and_change
        return spec
