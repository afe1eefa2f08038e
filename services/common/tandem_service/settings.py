"""Typed settings of a process, read once at start from flags and environment.

    flag `--kv-port 5600`  >  environment `TANDEM_KV_PORT=5600`  >  the default in the class

A role derives its own class from `PodSettings`, adds fields with docstrings (the help texts) and calls
`load`. A bad value, or a variable that is misspelt, ends the process with one sentence and exit code 2.
"""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from tandem_service.discovery import parse_entry
from tandem_service.redis_client import RedisAddress, is_redis_url
from tandem_service.tls import PemFiles, PodTls, Role, TlsFileError, is_loopback
from tandem_service.tracing import TracingSettingsError, check_environment
from tandem_service.validation import did_you_mean, reason

ENV_PREFIX = "TANDEM_"

#: A variable is taken for a misspelt setting if it is this similar to one. Settings of other roles and the
#: variables that Kubernetes makes of Services are less similar.
_SIMILAR = 0.82

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

Port = Annotated[int, Field(ge=0, le=65535)]


def _split(value: object) -> tuple[str, ...]:
    """ "a,b" (or several such strings) -> ("a", "b"); ValueError for anything else."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("expected one entry, or several separated by commas")
    return tuple(part.strip() for item in items for part in str(item).split(",") if part.strip())


def _targets(entries: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(parse_entry(entry)) for entry in entries)


#: A field of several texts, given as `one,two`.
Entries = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
#: A field of several gRPC targets, given as `host:port,k8s://service:port`.
Targets = Annotated[Entries, AfterValidator(_targets)]


class CommonSettings(BaseSettings):
    """Settings of every process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    #: What the process's certificate must state; None: any role.
    role: ClassVar[Role | None] = None

    host: str = "127.0.0.1"
    """address to listen on; off loopback, pods need the --pod-tls flags or --insecure"""
    pod_tls_cert: Path | None = None
    """PEM file of this process's certificate; with it, the links between pods are mutual TLS"""
    pod_tls_key: Path | None = None
    """PEM file of that certificate's key"""
    pod_tls_ca: Path | None = None
    """PEM file of the CAs that sign the pods' certificates"""
    insecure: bool = False
    """allow plaintext between pods off loopback: who reaches a pod's port can then act for any tenant"""
    metrics_port: Port | None = None
    """HTTP port of /metrics; 0 takes a free one; unset: metrics are not served"""
    pod_id: str = Field(default_factory=socket.gethostname)
    """name of this pod in logs, metrics and receipts"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least severe level that is logged"""
    log_format: Literal["console", "json"] = "console"
    """format of log lines; in the console format a gateway logs requests at the debug level only"""
    drain_s: Annotated[float, Field(ge=0.0)] = 10.0
    """seconds that running streams get to finish after SIGTERM"""

    def listen_port(self) -> int:
        """The port of the gRPC server; 0 takes a free one."""
        raise NotImplementedError(f"{type(self).__name__} names no gRPC port")

    @model_validator(mode="after")
    def _check_tls_files(self) -> Self:
        given = (self.pod_tls_cert, self.pod_tls_key, self.pod_tls_ca)
        if any(given) and not all(given):
            raise ValueError(
                "--pod-tls-cert, --pod-tls-key and --pod-tls-ca go together; give all three or none"
            )
        return self

    def pod_tls(self) -> PodTls | None:
        """Credentials for other pods; None: plaintext. Raises TlsFileError."""
        if self.pod_tls_cert is None or self.pod_tls_key is None or self.pod_tls_ca is None:
            return None
        return PodTls(PemFiles(self.pod_tls_cert, self.pod_tls_key, self.pod_tls_ca, self.role))

    def check_certificates(self) -> None:
        """Raises TlsFileError for a certificate that peers would refuse."""
        self.pod_tls()


class PodSettings(CommonSettings):
    """A pod with one gRPC port."""

    port: Port = 0
    """gRPC port; 0 takes a free one"""

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if self.pod_tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is not loopback and there is no TLS; give --pod-tls-cert, --pod-tls-key "
                "and --pod-tls-ca, or --insecure on a network where every machine is trusted"
            )
        return self

    def listen_port(self) -> int:
        return self.port


class RedisSettings(CommonSettings):
    """A process that uses Redis."""

    redis_url: str = ""
    """URL of Redis or of a Redis cluster: redis://, rediss:// (TLS) or unix://; empty: REDIS_URL"""
    redis_ca_file: Path | None = None
    """certificates that verify the server's (rediss://); unset: the system's"""
    redis_cert_file: Path | None = None
    """client certificate, if the server wants one (rediss://)"""
    redis_key_file: Path | None = None
    """key of the client certificate, if it is not in the same file"""

    @model_validator(mode="after")
    def _check_redis_url(self) -> Self:
        if not is_redis_url(self.redis_url or os.environ.get("REDIS_URL", "")):
            # Without the URL, which may have a password.
            raise ValueError(
                "--redis-url (or TANDEM_REDIS_URL, or REDIS_URL) is no URL of Redis; write it as "
                "redis://USER:PASSWORD@HOST:PORT, and characters such as /, # and ? in user and password in "
                "percent encoding (%2F, %23, %3F)"
            )
        return self

    def redis_address(self) -> RedisAddress | None:
        """The address of --redis-url or REDIS_URL; None if neither is set."""
        url = self.redis_url or os.environ.get("REDIS_URL", "")
        if not url:
            return None
        return RedisAddress(url, self.redis_ca_file, self.redis_cert_file, self.redis_key_file)


def load(cls: type[SettingsT], argv: Sequence[str] | None = None) -> SettingsT:
    """Settings from flags (`argv`; None: the process's own) and `TANDEM_*` variables.

    On a bad value prints one sentence to stderr and raises SystemExit(2); `--help` exits with 0.
    """
    try:
        settings = parse(cls, sys.argv[1:] if argv is None else argv)
        if isinstance(settings, CommonSettings):
            settings.check_certificates()
            check_environment()
        return settings
    except (SettingsError, TlsFileError, TracingSettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(cls: type[SettingsT], arguments: Sequence[str]) -> SettingsT:
    """Settings from flags and variables; reads no file. Raises SettingsError with one sentence."""
    _check_names(cls)
    try:
        return cls(_cli_parse_args=list(arguments))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        flag = "--" + field.replace("_", "-")
        if not field:  # of several fields
            message = reason(first)
        elif first["type"] == "missing":
            message = f"{flag} is required; give it or set {ENV_PREFIX}{field.upper()}"
        else:
            message = f"{flag} (or {ENV_PREFIX}{field.upper()}) is {first['input']!r}: {reason(first)}"
        raise SettingsError(message) from error
    except SettingsError as error:
        message = str(error.__cause__ or error).removeprefix("error parsing CLI: ")
        if (unknown := message.removeprefix("unrecognized arguments: ")) != message:
            message = _unknown_flag(cls, unknown.split()[0])
        raise SettingsError(message) from error


def _unknown_flag(cls: type[BaseSettings], flag: str) -> str:
    """The error message for an unknown flag."""
    if not flag.startswith("--"):
        return f"{flag!r} is not a flag; --help lists the flags"
    known = [f"--{field.replace('_', '-')}" for field in cls.model_fields]
    return f"{flag} is unknown{did_you_mean(flag, known) or '; --help lists the flags'}"


def _check_names(cls: type[BaseSettings]) -> None:
    """Raises SettingsError for a variable that looks like a misspelt setting; unset, it might open a port."""
    known = [field.upper() for field in cls.model_fields]
    for variable in os.environ:
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in known:
            continue
        for similar in difflib.get_close_matches(name, known, 1, _SIMILAR):
            raise SettingsError(f"{variable} is unknown; did you mean {ENV_PREFIX}{similar}?")
