"""The routes of the pages about the gateway, and of the API's description for programs."""

from __future__ import annotations

import html
import json

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from tandem_service.version import software_version

from tandem_gateway.dashboard.routes import file_response, static_files
from tandem_gateway.edge.site.openapi import openapi_document


def site_routes(*, model: str, max_model_len: int, requires_keys: bool) -> list[Route]:
    """The pages hold no data, so they need no key."""
    files = dict(static_files(__package__))
    tandem_version = software_version()
    texts = {
        "MODEL": model,
        "CONTEXT": f"{max_model_len:,}",
        "VERSION": tandem_version,
        "KEY": " -H 'Authorization: Bearer KEY'" if requires_keys else "",
        "API_KEY": "KEY" if requires_keys else "none",
        "KEY_HIDDEN": "" if requires_keys else "hidden",
    }
    index, index_type = files["index.html"]
    for name, text in texts.items():
        index = index.replace(f"{{{name}}}".encode(), html.escape(text, quote=False).encode())
    files["index.html"] = index, index_type
    document = json.dumps(openapi_document(tandem_version, requires_keys=requires_keys)).encode()

    async def about(request: Request) -> Response:
        return file_response(files, "index.html")

    async def docs(request: Request) -> Response:
        return file_response(files, "docs.html")

    async def docs_without_slash(request: Request) -> Response:
        return RedirectResponse("../docs")  # the page's links are relative

    async def file(request: Request) -> Response:
        return file_response(files, request.path_params["name"])

    async def openapi(request: Request) -> Response:
        return Response(document, media_type="application/json", headers={"cache-control": "no-cache"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": tandem_version})

    return [
        Route("/", about),
        Route("/docs", docs),
        Route("/docs/", docs_without_slash),
        Route("/site/{name}", file),
        Route("/openapi.json", openapi),
        Route("/version", version),
    ]
