"""Whether an image can run what a template asks of it. Pure.

Checked before a sandbox is created, from the facts that the import of the image found: what cannot
work fails the start of the sandbox, not each call to it.
"""

from paddock.envd.users import is_id
from paddock.kit.errors import FieldProblem, InvalidError
from paddock.runtime.local.images.model import ImageFacts
from paddock.runtime.port import Blueprint

_MAX_SHOWN = 20


def check_image(blueprint: Blueprint, facts: ImageFacts) -> None:
    """Raise `InvalidError` if the image lacks the template's user, or a shell for its commands."""
    if blueprint.user not in facts.users and not is_id(blueprint.user):
        shown = ", ".join(facts.users[:_MAX_SHOWN])
        raise InvalidError(
            f"user {blueprint.user!r} of the template does not exist in image {blueprint.image!r}, "
            f"which has {shown}: set spec.user to one of these, or add the user to the image",
            problems=[FieldProblem("spec.user", "does not exist in the image")],
        )
    if facts.shell is not None:
        return
    commands = {
        "spec.startCommand": blueprint.start_command,
        "spec.readyCommand": blueprint.ready_command,
    }
    for field, command in commands.items():
        if command:
            raise InvalidError(
                f"image {blueprint.image!r} has no shell (neither bash nor sh), so {field} of the "
                "template cannot run: remove it, or use an image with a shell",
                problems=[FieldProblem(field, "needs a shell in the image")],
            )
