"""API keys: what a key is, and the file that holds what is known of each, never a key itself.

A key is `sd-ID-SECRET`. ID names its entry and is no secret; of SECRET, 256 random bits, the file holds a
salted hash. Nobody can guess 256 bits, so a fast hash will do: slow ones are for passwords, and would cost
every call their time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specdecode.errors import InvalidArgumentError, NotFoundError

logger = logging.getLogger(__name__)

_KEY = re.compile(r"sd-(?P<id>[0-9a-f]{12})-(?P<secret>[A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = 1


@dataclass(frozen=True)
class KeyLimits:
    """What a key may use; None: as much as the router has.

    Attributes:
        requests_per_minute: requests that may begin.
        tokens_per_minute: prompt and output tokens.
        requests_at_once: requests that run or wait.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_at_once: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """What is known of a key.

    Attributes:
        id: its middle part.
        name: for people, logs and fair turns: keys of one name are one tenant.
        salt: hex.
        hash: hex, of salt and secret.
        created: seconds since the epoch.
        admin: whether it may change the router's policy.
        weight: share of the turns while requests wait.
        limits: what it may use.
    """

    id: str
    name: str
    salt: str
    hash: str
    created: float
    admin: bool = False
    weight: float = 1.0
    limits: KeyLimits = KeyLimits()

    def matches(self, secret: str) -> bool:
        """Whether it is this key's secret; takes the same time whatever the answer is."""
        return hmac.compare_digest(_hash(self.salt, secret), self.hash)


def _hash(salt: str, secret: str) -> str:
    return hashlib.blake2b(secret.encode(), key=bytes.fromhex(salt), person=b"specdecode-key").hexdigest()


def make_key(
    name: str, *, admin: bool = False, weight: float = 1.0, limits: KeyLimits | None = None
) -> tuple[str, ApiKey]:
    """A new key, and what the file is to hold of it.

    Raises:
        InvalidArgumentError: such a name can't be had.
    """
    if _NAME.fullmatch(name) is None:
        limit = "1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise InvalidArgumentError.of("name", f"{name!r} is refused; {limit}")
    identity, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    entry = ApiKey(
        identity, name, salt, _hash(salt, secret), round(time.time()), admin, weight, limits or KeyLimits()
    )
    return f"sd-{identity}-{secret}", entry


def find_key(key: str, known: Mapping[str, ApiKey]) -> ApiKey | None:
    """The entry of a key; None if there is none."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    entry = known.get(match["id"], _NOBODY)
    return entry if entry.matches(match["secret"]) else None


_NOBODY = ApiKey("", "", "00" * 16, "00" * 64, 0.0)
"""Matches nothing: a key that is not known takes as long as one that is."""


# The file

_ENTRIES = TypeAdapter(list[ApiKey])


def read_keys(path: Path) -> dict[str, ApiKey]:
    """The entries of a file, by id.

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: it can't be read, or is no file of keys.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist; specdecode keys add makes it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InvalidArgumentError.of("keys_path", f"{path} can't be read: {reason}") from None
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise InvalidArgumentError.of("keys_path", f"{path} is no file of keys of version {_VERSION}")
    try:
        entries = _ENTRIES.validate_python(content.get("keys"), strict=False)
        return {entry.id: _checked(entry) for entry in entries}
    except (ValidationError, ValueError):
        # What pydantic says holds values.
        raise InvalidArgumentError.of("keys_path", f"{path} holds an entry that is no key") from None


def _checked(entry: ApiKey) -> ApiKey:
    limits = (count for count in asdict(entry.limits).values() if count is not None)
    if len(bytes.fromhex(entry.salt)) < 16 or len(bytes.fromhex(entry.hash)) != 64:
        raise ValueError("salt or hash")
    if not 0.01 <= entry.weight <= 100 or any(count < 1 for count in limits):
        raise ValueError("weight or limit")
    return entry


def write_keys(path: Path, known: Mapping[str, ApiKey]) -> None:
    """Puts a file in place of the one before, all at once; only its owner may read it.

    Raises:
        InvalidArgumentError: it can't be written.
    """
    content: dict[str, Any] = {"version": _VERSION, "keys": [asdict(entry) for entry in known.values()]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise InvalidArgumentError.of("keys_path", f"{path} can't be written: {error.strerror}") from None


class KeyFile:
    """The keys of a file, read anew when it changes.

    A file that is gone or broken leaves the keys before it in force: nobody gets in who did not, and nobody
    is shut out by an editor's mistake.

    Raises:
        SpecdecodeError: at the start the file must be there and whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = self._state_now()
        self._keys: Mapping[str, ApiKey] = MappingProxyType(read_keys(path))

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key, by the file as it is now."""
        state = self._state_now()
        if state != self._state:
            self._state = state
            self._read()
        return find_key(key, self._keys)

    def _read(self) -> None:
        try:
            self._keys = MappingProxyType(read_keys(self._path))
        except (InvalidArgumentError, NotFoundError) as error:
            logger.error("keys stay as they were: %s", error.message)
        else:
            logger.info("%d API keys were read from %s", len(self._keys), self._path)

    def _state_now(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
