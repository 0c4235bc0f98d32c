"""Names and tags that a build is requested with: `[namespace/]alias[:tag]`. Pure.

The messages are those of E2B, whose clients' tests look for them.
"""

import re
from collections.abc import Iterable

from msgspec import Struct

from paddock.kit.errors import InvalidError
from paddock.resources.kinds.template import LABEL_BUILT, SandboxTemplate
from paddock.resources.template_references import DEFAULT_TAG, is_build_id
from paddock.resources.transitions.template_tags import MAX_TAGS

MAX_ALIAS = 128
MAX_TAG = 128
MAX_BUILD_TAGS = 64
"""Tags that a build can be requested with, as in the schema of TemplateBuild."""
_PART = re.compile(r"[a-z0-9_-]+")
_TAG = re.compile(r"[a-z0-9_.-]+")


class RequestedName(Struct, frozen=True):
    """What a client calls the template to build."""

    alias: str
    tag: str = ""
    """Empty if the name has no tag, or the tag `default`."""


def parse_name(text: str, team: str) -> RequestedName:
    """Return the alias and the tag of a name; `InvalidError` if it is malformed or of another
    team."""
    text = text.strip().lower()
    if not text:
        raise InvalidError("Name is required")
    space, slash, rest = text.rpartition("/")
    alias, colon, tag = rest.partition(":")
    if slash and not _PART.fullmatch(space):
        raise InvalidError(f"Invalid name: {text!r} is not [namespace/]name[:tag]")
    if not _PART.fullmatch(alias) or len(alias) > MAX_ALIAS:
        raise InvalidError(
            f"Invalid name: {alias!r} must be up to {MAX_ALIAS} lower case letters, digits, '-' "
            "and '_'"
        )
    if colon:
        tag = parse_tag(tag)
    if slash and space != team:
        raise InvalidError(f"namespace '{space}' must match your team '{team}'")
    return RequestedName(alias, "" if tag == DEFAULT_TAG else tag)


def parse_tag(text: str) -> str:
    """Return a tag in lower case; `InvalidError` if it is malformed."""
    tag = text.strip().lower()
    if not _TAG.fullmatch(tag) or len(tag) > MAX_TAG:
        raise InvalidError(
            f"Invalid tag: {tag!r} must be 1 to {MAX_TAG} lower case letters, digits, '-', '_' "
            "and '.'"
        )
    if is_build_id(tag):
        raise InvalidError(f"Invalid tag: {tag!r} has the form of a build id")
    return tag


def parse_tags(texts: Iterable[str]) -> tuple[str, ...]:
    """Return tags in lower case without duplicates."""
    tags = tuple(dict.fromkeys(parse_tag(text) for text in texts))
    if len(tags) > MAX_TAGS:
        raise InvalidError(f"a template has at most {MAX_TAGS} tags")
    return tags


def requested_tags(name: RequestedName, tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of a build: those of the request and of its name, else `default`."""
    named = (name.tag,) if name.tag else ()
    found = tuple(dict.fromkeys((*named, *parse_tags(tags))))
    if len(found) > MAX_BUILD_TAGS:
        raise InvalidError(
            f"a build is requested with at most {MAX_BUILD_TAGS} tags, not {len(found)}: assign "
            "the others once it is ready"
        )
    return found or (DEFAULT_TAG,)


def aliases_of(template: SandboxTemplate) -> tuple[str, ...]:
    """Return the names of a template without its team.

    A template that was created for an alias that no object can have has a generated name, which
    is not an alias.
    """
    aliases, name = template.spec.aliases, template.metadata.name
    if LABEL_BUILT in template.metadata.labels and aliases:
        return aliases
    return tuple(dict.fromkeys((name, *aliases)))


def names_of(template: SandboxTemplate) -> tuple[str, ...]:
    """Return the names of a template with its team: `team/alias`."""
    home = template.metadata.namespace
    return tuple(alias if "/" in alias else f"{home}/{alias}" for alias in aliases_of(template))
