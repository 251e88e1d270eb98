"""Who asks: callers by their API keys, and what a key keeps apart.

Both fronts ask `Access.caller` before anything else is done; the router takes the caller with the request.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from specdecode.config import RouterSettings
from specdecode.errors import PermissionDeniedError, Reason, UnauthenticatedError
from specdecode.keys import KeyFile, KeyLimits

_BEARER = re.compile(r"bearer +(?P<key>\S+) *", re.IGNORECASE)


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        key: id of the key; "" where none are used.
        tenant: whose turn it is while requests wait, and whose caches are used.
        weight: share of the turns.
        limits: what the key may use.
        admin: whether it may change the policy.
        has_own_caches: whether prefix cache and suffix memory are the tenant's alone.
    """

    key: str = ""
    tenant: str = ""
    weight: float = 1.0
    limits: KeyLimits = field(default_factory=KeyLimits)
    admin: bool = True
    has_own_caches: bool = False

    def salt(self, asked: bytes) -> bytes:
        """The salt of the caches for a request that asks for `asked`: no other tenant can have it."""
        if not self.has_own_caches:
            return asked
        tenant = hashlib.blake2b(self.tenant.encode(), person=b"specdecode-owner", digest_size=32)
        return hashlib.blake2b(asked, key=tenant.digest(), digest_size=32).digest()

    def check_admin(self) -> None:
        """Refuses who may not change the policy.

        Raises:
            PermissionDeniedError: the key is not an admin's.
        """
        if not self.admin:
            raise PermissionDeniedError("this key may not change the policy; specdecode keys add --admin")


ANYONE = Caller()
"""Who asks where no keys are used."""


class Access:
    """Callers by the keys of a file; anyone where there is none.

    Args:
        keys: None: no keys are used.
        partitions: whether each tenant has caches of its own.
    """

    def __init__(self, keys: KeyFile | None = None, partitions: bool = True) -> None:
        self._keys = keys
        self._partitions = partitions

    @classmethod
    def of(cls, settings: RouterSettings) -> Access:
        """What the settings say.

        Raises:
            SpecdecodeError: the file of keys is not there, or broken.
        """
        file = settings.keys_file
        return cls(None if file is None else KeyFile(file), settings.partition_caches)

    def caller(self, authorization: str | None) -> Caller:
        """Who asks, by the header or metadata `authorization` (`Bearer KEY`).

        Raises:
            UnauthenticatedError: no key, or none that is known; says nothing of what was sent.
        """
        if self._keys is None:
            return ANYONE
        match = _BEARER.fullmatch(authorization or "")
        if match is None:
            raise UnauthenticatedError(
                "an API key is needed: authorization: Bearer KEY", reason=Reason.API_KEY_MISSING
            )
        entry = self._keys.find(match["key"])
        if entry is None:
            raise UnauthenticatedError("the API key is not known", reason=Reason.API_KEY_INVALID)
        return Caller(entry.id, entry.name, entry.weight, entry.limits, entry.admin, self._partitions)
