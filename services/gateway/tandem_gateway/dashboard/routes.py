"""/dashboard: the page, which holds no data, and /dashboard/data, which requires an operator's key."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.slo import ATTAINMENT_OBJECTIVE

from tandem_gateway.auth import ApiKeys, authorization
from tandem_gateway.dashboard.ended import SHOWN_PER_SECOND
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.rows import COLUMNS

#: Content and type, by path.
Files: TypeAlias = Mapping[str, tuple[bytes, str]]

_INTEGER = TypeAdapter(int)
#: Fields of a class that the page does not show.
_NO_OBJECTIVE = ("name", "is_strict", "waits")
#: Samples per response, about a megabyte; new readers send several requests.
_MAX_SAMPLES = 300
_CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".LICENSE": "text/plain",
}
#: The page loads nothing from elsewhere, and no other site can show it in a frame.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def dashboard_routes(history: History, keys: ApiKeys, *, gateway_id: str, model: str) -> list[Route]:
    """`gateway_id` names this gateway on the page."""
    files = static_files(__package__)
    about = {
        "gateway": gateway_id,
        "model": model,
        # Changes when the numbers of samples start again from 0.
        "start": secrets.token_hex(8),
        "attainment_objective": ATTAINMENT_OBJECTIVE,
        "objectives": {
            name: {key: value for key, value in asdict(slo).items() if key not in _NO_OBJECTIVE}
            for name, slo in keys.slo_classes.items()
        },
        "requests_per_second": SHOWN_PER_SECOND,
        "columns": dict(COLUMNS),
    }
    about_json = json.dumps(about, separators=(",", ":")).encode()

    async def data(request: Request) -> Response:
        """The samples from number `since`; `next` is the number after the last one, `newest` the number of
        the newest sample."""
        given = request.query_params.get("since", "0")
        try:
            since = _INTEGER.validate_python(given)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise InvalidRequestError("since", f"is {quoted(given)}: {message}") from None
        keys.authenticate_operator(authorization(request.headers))
        stop, samples = history.since(since, _MAX_SAMPLES)
        newest = history.next_number - 1
        body = b'{"about":%b,"next":%d,"newest":%d,"samples":%b}' % (about_json, stop, newest, samples)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def without_slash(request: Request) -> Response:
        # The page's links are relative to its folder, so that it works behind a proxy's prefix.
        return RedirectResponse("dashboard/")

    async def page(request: Request) -> Response:
        return file_response(files, request.path_params["path"] or "index.html")

    return [
        Route("/dashboard/data", data),
        Route("/dashboard", without_slash),
        Route("/dashboard/{path:path}", page),
    ]


def static_files(package: str) -> Files:
    """Reads the files in the folder static/ of a package, once."""
    folder = resources.files(package) / "static"
    found: dict[str, tuple[bytes, str]] = {}
    for prefix, directory in (("", folder), ("vendor/", folder / "vendor")):
        for file in directory.iterdir() if directory.is_dir() else ():
            suffix = file.name[file.name.rfind(".") :]
            if file.is_file() and suffix in _CONTENT_TYPES:
                found[prefix + file.name] = file.read_bytes(), _CONTENT_TYPES[suffix]
    return found


def file_response(files: Files, path: str) -> Response:
    """Raises HTTPException 404."""
    if path not in files:
        raise HTTPException(404, "there is no such file")
    content, content_type = files[path]
    return Response(content, media_type=content_type, headers=PAGE_HEADERS)
