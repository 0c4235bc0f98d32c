"""Reads the credentials of registries from the Secrets that a template names."""

import base64
import binascii

from paddock.engine.reader import Reader
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.kinds.builtin import Secret
from paddock.resources.meta import Key
from paddock.runtime.docker_config import all_credentials, decode_config
from paddock.runtime.port import RegistryCredentials

SECRET_TYPE = "kubernetes.io/dockerconfigjson"  # noqa: S105 - the name of a type
_FIELD = ".dockerconfigjson"


async def credentials_in(
    store: Reader, namespace: str, names: tuple[str, ...]
) -> tuple[RegistryCredentials, ...]:
    """Return the credentials in Secrets. Raises `InvalidError` that names an unusable one."""
    found: list[RegistryCredentials] = []
    for name in names:
        key = Key(namespace, name)
        try:
            secret = await store.get(Secret, key)
        except NotFoundError as error:
            raise InvalidError(
                f"the pull secret {key} does not exist",
                hint=f"create a Secret of type {SECRET_TYPE}, or correct imagePullSecrets",
            ) from error
        found += _read(secret, key)
    return tuple(found)


def _read(secret: Secret, key: Key) -> tuple[RegistryCredentials, ...]:
    if secret.type != SECRET_TYPE or _FIELD not in secret.data:
        raise InvalidError(
            f"the pull secret {key} has the type {secret.type!r}, not {SECRET_TYPE}",
            hint="create it with `kubectl create secret docker-registry`",
        )
    try:
        data = base64.b64decode(secret.data[_FIELD], validate=True)
    except binascii.Error as error:
        raise InvalidError(f"the pull secret {key} is not base64") from error
    return all_credentials(decode_config(data, f"the pull secret {key}"))
