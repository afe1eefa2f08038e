"""Handles paths without a route: ignores a slash at the end, and answers other paths with 404 or 405 and a
hint."""

from __future__ import annotations

from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from tandem_core.errors import quoted

#: Pages, whose links are relative.
_PAGES = ("/dashboard/", "/docs/")
#: Unsupported parts of OpenAI's, Anthropic's and vLLM's APIs, by the path after /v1/.
_ABSENT = (
    *("embeddings", "moderations", "files", "uploads", "images", "audio", "videos", "batches", "fine_tuning"),
    *("assistants", "threads", "vector_stores", "containers", "conversations", "evals", "realtime", "rerank"),
    *("score", "classify", "pooling", "messages/batches"),
)


class TrailingSlashMiddleware:
    """Serves `/v1/models/` as `/v1/models`. With a redirect, some clients lose a POST's body, or https behind
    a proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and path not in _PAGES:
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def hint(method: str, path: str, error: HTTPException, known_paths: Collection[str]) -> str:
    """The cause and the remedy, for a path without a route."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").replace(", ", " or ")
        return f"{method} {quoted(path)}: is not served with {method}; use {allowed}"
    text = error.detail if error.detail != "Not Found" else "there is no such path; see /docs"
    rest = path.removeprefix("/v1")
    absent = next((name for name in _ABSENT if f"{rest}/".startswith(f"/{name}/")), None)
    if absent is not None:
        kind = absent.replace("_", " ").replace("/", " ")
        text = f"this gateway serves no {kind}; see /docs for what it serves"
    elif f"/v1{path}" in known_paths:
        text = f"use /v1{path}; OpenAI's clients need a base URL that ends with /v1"
    elif rest in known_paths:
        text = f"use {rest}; Anthropic's clients need a base URL without /v1"
    elif path.startswith("/api/"):
        text = "Ollama's API is not served; use OpenAI's, see /docs"
    elif any(rest.startswith(f"/{name}/") for name in ("responses", "chat/completions", "completions")):
        text = "answers are not stored under their ids; see /docs"
    return f"{method} {quoted(path)}: {text}"
