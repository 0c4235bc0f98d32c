"""Signs requests to AWS: Signature Version 4. Pure.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

_ALGORITHM = "AWS4-HMAC-SHA256"


class AwsKeys(Struct, frozen=True, kw_only=True):
    """The access keys of an AWS account, for one region."""

    access_key_id: str
    secret_access_key: str
    region: str

    def __repr__(self) -> str:
        """Return a text without the keys."""
        return f"AwsKeys(region={self.region!r})"


def signed_headers(
    keys: AwsKeys, service: str, headers: Mapping[str, str], body: bytes, now: datetime
) -> dict[str, str]:
    """Return the headers of a `POST /` with its signature. `headers` include `Host`.

    `now` is in UTC. AWS accepts a signature for five minutes.
    """
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    sent = {**headers, "X-Amz-Date": moment}
    lines = sorted((name.lower(), value.strip()) for name, value in sent.items())
    names = ";".join(name for name, _ in lines)
    canonical = "\n".join(
        (
            *("POST", "/", ""),
            *(f"{name}:{value}" for name, value in lines),
            *("", names),
            hashlib.sha256(body).hexdigest(),
        )
    )
    scope = f"{moment[:8]}/{keys.region}/{service}/aws4_request"
    text = "\n".join((_ALGORITHM, moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    signature = _hmac(key, text).hex()
    credential = f"Credential={keys.access_key_id}/{scope}"
    authorization = f"{_ALGORITHM} {credential}, SignedHeaders={names}, Signature={signature}"
    return {**sent, "Authorization": authorization}


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
