"""API keys: maps `Authorization: Bearer KEY`, or `x-api-key: KEY`, to a tenant.

The keys file has one JSON object per line, with digests only:

    {"key_sha256": "9f86d0...", "tenant": "acme", "slo_classes": ["interactive", "batch"]}

`slo_classes` is optional (default: all); its first is the caller's default. `min_ttft_ms`, `min_tpot_ms` and
`min_e2e_ms` bound the objectives that a request may ask for. `"operator": true` gives the key access to the
dashboard and /metrics, which show the requests of all tenants. Three fields belong to the tenant, in any of
its lines: `weight` (1), its relative share of the work when demand exceeds capacity; `max_requests`, at once;
and `tokens_per_minute`. A changed file is read again within seconds. Without a keys file every caller is the
tenant "default" with access to everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.slo import DEFAULT_SLO_CLASSES, LONGEST_OBJECTIVE_S, NO_OBJECTIVES, SloTarget
from tandem_service.validation import first_problem

from tandem_gateway.errors import ForbiddenError, GatewayError, UnauthenticatedError

#: Time between two checks of the file.
_FOLLOW_S = 2.0
#: Fields of a keys file that all lines of a tenant share.
_OF_TENANT = ("weight", "max_requests", "tokens_per_minute")


def authorization(headers: Mapping[str, str]) -> str:
    """The value for `ApiKeys.authenticate` from a request's headers, whose names are in lower case. A key in
    x-api-key counts if there is no bearer token, for example if Authorization has a proxy's password."""
    given, key = headers.get("authorization", ""), headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not given.lower().startswith("bearer ") else given


@dataclass(frozen=True)
class Caller:
    """A tenant and the SLO classes that it may use, the default first; () allows all."""

    tenant: str
    slo_classes: tuple[str, ...] = ()
    #: All configured classes.
    known_classes: Mapping[str, SloTarget] = field(default_factory=lambda: DEFAULT_SLO_CLASSES)
    #: Most requests of the tenant at once; None: the share in the gateway's settings.
    max_requests: int | None = None
    #: Limit on the tenant's prompt and output tokens; None: no limit.
    tokens_per_minute: int | None = None
    #: The tenant's relative share of the work when demand exceeds capacity.
    weight: float = 1.0
    #: Tightest objectives that requests may ask for; 0: any.
    tightest: SloTarget = NO_OBJECTIVES
    #: Whether all callers are one tenant, because no keys are required.
    is_anyone: bool = False
    #: Whether it may see data of all tenants.
    is_operator: bool = False

    @property
    def waiting_class(self) -> str:
        """The first of its classes in which late requests wait; "": there is none."""
        allowed = self.slo_classes or self.known_classes
        return next((name for name in allowed if not self.known_classes[name].refuses), "")

    def slo(self, name: str, objectives: SloTarget) -> SloTarget:
        """The class `name`, "" for the default, with the request's own objectives.

        Raises InvalidRequestError, ForbiddenError.
        """
        allowed = self.slo_classes or tuple(self.known_classes)
        chosen = name or allowed[0]
        if chosen not in self.known_classes:
            raise InvalidRequestError(
                "slo_class", f"{quoted(chosen)} is unknown; use one of {', '.join(self.known_classes)}"
            )
        if chosen not in allowed:
            raise ForbiddenError(f"slo_class: this key may use {', '.join(allowed)}, not {chosen!r}")
        for kind in ("ttft", "tpot", "e2e"):
            if getattr(objectives, f"{kind}_slowdown"):
                raise InvalidRequestError(
                    f"slo.{kind}_slowdown",
                    f"can be set only by classes; name a class that has it, or send {kind}_ns",
                )
            asked, bound = (getattr(one, f"{kind}_s") for one in (objectives, self.tightest))
            if asked > LONGEST_OBJECTIVE_S:
                raise InvalidRequestError(
                    f"slo.{kind}_ns",
                    f"is {asked:.0f} s; send at most {LONGEST_OBJECTIVE_S} s, or 0 for none",
                )
            if 0 < asked < bound:
                raise ForbiddenError(
                    f"{kind} objective: this key may ask for {bound * 1000:g} ms or more, not for "
                    f"{asked * 1000:g} ms"
                )
        return self.known_classes[chosen].overridden(objectives)


class KeyFileError(Exception):
    """The keys file is missing or damaged; the message names the line."""


def _version(path: Path | None) -> tuple[int, int, int] | None:
    """Identifies the file's content; a changed mounted Secret has another inode. None: no file."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


def _check_digest(text: str) -> str:
    if len(text) != 64 or not set(text) <= set(string.hexdigits):
        raise ValueError("must be the key's SHA-256 in 64 hex digits, as `tandem keys new` prints it")
    return text


class _KeyLine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key_sha256: Annotated[str, AfterValidator(_check_digest)]
    tenant: str = Field(min_length=1)
    slo_classes: tuple[str, ...] | None = Field(default=None, min_length=1)
    max_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    weight: float | None = Field(default=None, gt=0, le=1000)
    min_ttft_ms: float = Field(default=0.0, ge=0)
    min_tpot_ms: float = Field(default=0.0, ge=0)
    min_e2e_ms: float = Field(default=0.0, ge=0)
    operator: bool = False


class ApiKeys:
    """Authenticates bearer tokens."""

    def __init__(
        self,
        callers: dict[bytes, Caller] | None,
        anyone: Caller,
        path: Path | None = None,
        version: tuple[int, int, int] | None = None,
    ) -> None:
        """`callers` by SHA-256 digest of their key; None: no key is required, and each caller is `anyone`.
        `path` is their file, `version` its `_version` before it was read."""
        self._callers = callers
        self._anyone = anyone
        self._path = path
        self._version = self._seen = version
        #: Called with the error of each refused caller.
        self.on_refusal: Callable[[GatewayError], None] = lambda _: None

    @property
    def slo_classes(self) -> Mapping[str, SloTarget]:
        """All configured classes."""
        return self._anyone.known_classes

    def described(self) -> str:
        """Who may call, for the log."""
        if self._callers is None:
            return "no API keys: everyone who reaches the ports may use the models"
        num_tenants = len({caller.tenant for caller in self._callers.values()})
        return f"API keys: {len(self._callers)} of {num_tenants} tenants"

    @classmethod
    def load(cls, path: Path | None, slo_classes: Mapping[str, SloTarget] = DEFAULT_SLO_CLASSES) -> ApiKeys:
        """Reads a keys file; None: no key is required. Raises KeyFileError."""
        anyone = Caller("default", known_classes=slo_classes, is_anyone=True, is_operator=True)
        if path is None:
            return cls(None, anyone)
        version = _version(path)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"API keys file {path} cannot be read: {error}") from error
        callers: dict[bytes, Caller] = {}
        numbers: dict[bytes, int] = {}
        shared: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                entry = _KeyLine.model_validate_json(line)
            except ValidationError as error:
                problem = first_problem(error, _KeyLine.model_fields, "the line")
                raise KeyFileError(f"{path}:{number}: {problem}") from error
            allowed = entry.slo_classes or ()
            unknown = set(allowed) - set(slo_classes)
            if unknown:
                raise KeyFileError(
                    f"{path}:{number}: slo_classes: {sorted(unknown)} unknown; use {tuple(slo_classes)}"
                )
            of_tenant = shared.setdefault(entry.tenant, {})
            for name in _OF_TENANT:
                value = getattr(entry, name)
                if value is not None and of_tenant.setdefault(name, value) != value:
                    raise KeyFileError(
                        f"{path}:{number}: {name}: tenant {entry.tenant} has {of_tenant[name]:g} in a line "
                        f"before and {value:g} here; give one"
                    )
            digest = bytes.fromhex(entry.key_sha256)
            if digest in numbers:
                raise KeyFileError(f"{path}:{number}: key_sha256: line {numbers[digest]} has the same key")
            numbers[digest] = number
            callers[digest] = Caller(
                entry.tenant,
                allowed,
                slo_classes,
                tightest=SloTarget(
                    "", entry.min_ttft_ms / 1000, entry.min_tpot_ms / 1000, entry.min_e2e_ms / 1000
                ),
                is_operator=entry.operator,
            )
        for digest, caller in callers.items():
            callers[digest] = replace(caller, **shared[caller.tenant])
        return cls(callers, anyone, path, version)

    async def follow(self) -> None:
        """Reads the file again when it changes, until cancelled."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the file again if it has changed, and has not changed since the last look: it may be only
        half written. A damaged file changes nothing and logs a warning. Running answers of removed keys
        continue."""
        version, seen = _version(self._path), self._seen
        self._seen = version
        if version == self._version or version != seen:
            return
        self._version = version
        log = structlog.get_logger("tandem.auth")
        try:
            fresh = ApiKeys.load(self._path, self.slo_classes)
        except KeyFileError as error:
            log.warning("changed API keys file is damaged; the earlier keys stay valid", reason=str(error))
            return
        self._callers = fresh._callers
        log.info("API keys read again", num_keys=len(fresh._callers or ()))

    def authenticate(self, authorization: str) -> Caller:
        """The caller behind an Authorization header or metadata value; raises UnauthenticatedError."""
        try:
            return self._find(authorization)
        except UnauthenticatedError as error:
            self.on_refusal(error)
            raise

    def is_known(self, authorization: str) -> bool:
        """Whether `authenticate` would find a caller."""
        try:
            self._find(authorization)
        except UnauthenticatedError:
            return False
        return True

    def _find(self, authorization: str) -> Caller:
        if self._callers is None:
            return self._anyone
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError(
                "an API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        # How long a search by digest takes reveals nothing about the keys.
        found = self._callers.get(hashlib.sha256(key.strip().encode()).digest())
        if found is None:
            raise UnauthenticatedError("the API key is not known here; check it for typing errors")
        return found

    def authenticate_operator(self, authorization: str) -> Caller:
        """Like `authenticate`; raises ForbiddenError for a key that is not an operator's."""
        caller = self.authenticate(authorization)
        if not caller.is_operator:
            error = ForbiddenError(
                "this shows the requests of all tenants; use a key whose line in the keys file has "
                '"operator": true'
            )
            self.on_refusal(error)
            raise error
        return caller
