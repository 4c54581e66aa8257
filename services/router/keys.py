"""API keys: who may ask, under which name, within which limits.

    --api-key KEY                          one key; its name is "default"
    BATON_API_KEYS=alice:KEY,bob:KEY       several
    --api-keys-file FILE                   TOML, with limits and admin keys; read again on SIGHUP

    [keys.alice]
    key = "..."                            or key_sha256 = "..." (hex), so that the file holds no key
    max_concurrent = 8                     requests in the router at once; 0 = no limit, as below
    max_tokens_per_minute = 100000         prompt and answer; see planning.key_limits
    priority_floor = 0                     it cannot ask for more urgent priorities than this
    weight = 2.0                           its share beside other keys'
    admin = true                           opens the admin port too

Without any key everybody may ask and has the name "none". Names may stand in logs and metrics, keys never.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from core.errors import ConfigError, RequestError, Unauthorized
from core.settings import Settings
from planning.fair_queue import MAX_PRIORITY, MIN_PRIORITY, Share

MAX_KEYS = 1024
"""Each may be a label of metrics."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
Sha256 = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`digest`: SHA-256 of the key. `share.name` is its name."""

    share: Share
    digest: bytes = b""
    admin: bool = False

    @property
    def name(self) -> str:
        return self.share.name


class AdminKeyRequired(RequestError):
    http_status = 403
    error_type = "authentication_error"
    code = "admin_key_required"


NO_KEY = ApiKey(Share("none"))
"""Everybody's, where there are no keys."""


class KeyRing:
    """All keys of a router. Raises ConfigError for two of one name, and for one key of two names."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys: dict[bytes, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            if key.name in names:
                raise ConfigError(f"there are two API keys of the name {key.name}; give each its own")
            same = self._keys.setdefault(key.digest, key)
            if same is not key:
                raise ConfigError(
                    f"the API keys {same.name} and {key.name} are the same key; give each name its own"
                )
            names.add(key.name)
        if len(names) > MAX_KEYS:
            raise ConfigError(f"there are {len(names)} API keys; a router takes {MAX_KEYS}")

    def user(self, authorization: str) -> ApiKey:
        """The key that a request's `Authorization` header holds. Raises Unauthorized."""
        found = self._find(authorization)
        if found is None:
            raise Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        return found

    def admin(self, authorization: str) -> ApiKey:
        """As `user`, of an admin key. Raises AdminKeyRequired for another one."""
        found = self.user(authorization)
        if found is not NO_KEY and not found.admin:
            raise AdminKeyRequired("this port wants an API key with `admin = true` in --api-keys-file")
        return found

    def _find(self, authorization: str) -> ApiKey | None:
        """How long it takes tells of a digest at most, which leads to no key."""
        if not self._keys:
            return NO_KEY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self._keys.get(hashlib.sha256(key.strip(" ").encode("latin-1")).digest())


class _Entry(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    key: Annotated[str, Field(min_length=1)] | None = None
    key_sha256: Sha256 | None = None
    max_concurrent: Annotated[int, Field(ge=0)] = 0
    max_tokens_per_minute: Annotated[int, Field(ge=0)] = 0
    priority_floor: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = MIN_PRIORITY
    weight: Annotated[float, Field(ge=0.01, le=100, strict=False)] = 1.0
    admin: bool = False

    @model_validator(mode="after")
    def _one_key(self) -> _Entry:
        if (self.key is None) == (self.key_sha256 is None):
            raise PydanticCustomError("one_key", "there should be either key or key_sha256")
        return self

    def named(self, name: str) -> ApiKey:
        share = Share(name, self.weight, self.priority_floor, self.max_concurrent, self.max_tokens_per_minute)
        digest = bytes.fromhex(self.key_sha256) if self.key is None else _digest(self.key)  # type: ignore[arg-type]
        return ApiKey(share, digest, self.admin)


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    keys: dict[str, _Entry]


def load_keys(settings: Settings) -> KeyRing:
    """The keys of all three sources. Raises ConfigError, which names no key."""
    keys = [ApiKey(Share("default"), _digest(settings.api_key))] if settings.api_key else []
    for entry in filter(None, settings.api_keys.split(",")):
        name, colon, key = entry.strip().partition(":")
        if not colon or not key:
            raise ConfigError("BATON_API_KEYS should be NAME:KEY,NAME:KEY; an entry has no name or no key")
        keys.append(ApiKey(Share(_checked(name, "BATON_API_KEYS")), _digest(key)))
    if settings.api_keys_file:
        keys += _read(settings.api_keys_file)
    return KeyRing(keys)


def _read(path: str) -> list[ApiKey]:
    try:
        file = _File.model_validate(tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read the keys file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError:  # its message may quote the line
        raise ConfigError(f"the keys file {path} is not valid TOML") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the keys file {path} is not UTF-8 text") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError(f"keys file {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not file.keys:
        raise ConfigError(f"the keys file {path} has no keys; without any, leave --api-keys-file out")
    return [entry.named(_checked(name, path)) for name, entry in file.keys.items()]


def _checked(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a key's name has 1 to 64 letters, digits, `_`, `.` and `-`")
    if name == NO_KEY.name:
        raise ConfigError(f"{where}: the name {name} stands for requests without a key; choose another")
    return name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
