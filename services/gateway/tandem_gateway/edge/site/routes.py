"""The routes of the pages, and of what programs ask a server about itself."""

from __future__ import annotations

import html
import json
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tandem_service.version import software_version

from tandem_gateway.dashboard.routes import PAGE_HEADERS
from tandem_gateway.edge.site.openapi import openapi_document

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def site_routes(*, model: str, max_model_len: int, requires_keys: bool) -> list[Route]:
    """The files are read once. They hold no data, so they need no key."""
    folder = resources.files(__package__) / "static"
    files = {
        file.name: (file.read_bytes(), _TYPES[file.name[file.name.rfind(".") :]]) for file in folder.iterdir()
    }
    tandem_version = software_version()
    key = " -H 'Authorization: Bearer KEY'" if requires_keys else ""
    index = files["index.html"][0].decode()
    for name, text in (
        ("MODEL", model),
        ("CONTEXT", f"{max_model_len:,}"),
        ("VERSION", tandem_version),
        ("KEY", key),
    ):
        index = index.replace(f"{{{name}}}", html.escape(text, quote=False))
    document = json.dumps(openapi_document(tandem_version, requires_keys=requires_keys)).encode()

    async def about(request: Request) -> Response:
        return Response(index, media_type="text/html", headers=PAGE_HEADERS)

    async def docs(request: Request) -> Response:
        return Response(files["docs.html"][0], media_type="text/html", headers=PAGE_HEADERS)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404, "there is no such file")
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json", headers={"cache-control": "no-cache"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": tandem_version})

    return [
        Route("/", about),
        Route("/docs", docs),
        Route("/site/{name}", file),
        Route("/openapi.json", openapi),
        Route("/version", version),
    ]
