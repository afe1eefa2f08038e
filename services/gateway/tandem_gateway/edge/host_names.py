"""Checks the host name of requests to a gateway without keys, against DNS rebinding.

If the name of a foreign web page resolves to 127.0.0.1, the browser treats the gateway as the page's own
origin, and the page can read all answers. The Host header then has the page's name. Names that a foreign page
cannot have are therefore safe:

    IP addresses                   browsers use them without DNS, so they cannot be rebound
    localhost, *.localhost         reserved names of this machine
    ip6-localhost, ip6-loopback    names in /etc/hosts
    this machine's own name
    host.docker.internal, ...      reserved names (`internal`) by which containers reach their machine
    --allowed-hosts
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tandem_core.errors import quoted

from tandem_gateway.dialects.openai_render import error_json
from tandem_gateway.errors import ForbiddenError

_OWN_NAMES = ("localhost", "*.localhost", "ip6-localhost", "ip6-loopback")
_HOSTS_OF_CONTAINERS = ("host.docker.internal", "gateway.docker.internal", "host.containers.internal")
#: IPv4 addresses with fewer than four parts, or in hexadecimal.
_SHORT_IPV4 = re.compile(r"[0-9a-fx]+(\.[0-9a-fx]+){0,3}")


class HostNamesMiddleware:
    """Refuses requests with other host names with 403."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        """`allowed`: additional names; `*.DOMAIN` allows all names in a domain."""
        self._app = app
        names = {*_OWN_NAMES, *_HOSTS_OF_CONTAINERS, socket.gethostname(), *allowed}
        self._names = {name.lower() for name in names if name and not name.startswith("*")}
        self._domains = tuple(name.lower()[1:] for name in names if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "localhost") if scope["type"] == "http" else "localhost"
        app = self._app if self._is_allowed(given) else JSONResponse(_refusal(given), status_code=403)
        await app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        """`host`: with a port or without."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        return name in self._names or name.endswith(self._domains) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return True
    try:
        return bool(_SHORT_IPV4.fullmatch(name) and socket.inet_aton(name))
    except OSError:
        return False


def _refusal(host: str) -> dict[str, object]:
    error = ForbiddenError(
        f"Host {quoted(host)} is not a name of this machine, and no keys are required; use localhost, or "
        "start the gateway with --allowed-hosts and this name, with --api-keys-file, or with --no-api-keys "
        "where everyone may use the models"
    )
    return {"type": "error", **error_json(error)}
