"""HTTP: /tokenize, /detokenize in vLLM's format, with the limits of prompts, and Anthropic's
/v1/messages/count_tokens.

A prompt is tokenized as in /v1/completions, messages as in /v1/chat/completions or /v1/messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import check_token_ids

from tandem_gateway.admission.quotas import OpenCalls
from tandem_gateway.auth import ApiKeys, Caller, authorization
from tandem_gateway.call.gateway import Gateway
from tandem_gateway.dialects.fields import Ignored, rename
from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.dialects.messages_models import CountBody
from tandem_gateway.dialects.openai_models import ChatBody, parse_json
from tandem_gateway.edge.http_stream import until_disconnect
from tandem_gateway.edge.request_body import read_body
from tandem_gateway.request import ReceivedRequest


class TokenizeBody(JsonBody):
    """Has `prompt`, or `messages` and other fields of a chat."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    prompt: str | None = None
    """The text; if it is absent, messages and other fields of a chat."""
    add_special_tokens: bool | None = None
    """For a prompt only; the chat template writes the special tokens of messages."""
    return_token_strs: bool = False
    """The answer has the tokens' texts too."""

    def chat(self, ignored: Ignored) -> ChatBody | None:
        """The chat, or None for a prompt. Raises InvalidRequestError."""
        fields: dict[str, Any] = dict(self.model_extra or {})
        if self.prompt is not None:
            if "messages" in fields:
                raise InvalidRequestError("messages", "does not go with prompt; leave it out")
            ignored.unknown("", fields)
            return None
        if "messages" not in fields:
            raise InvalidRequestError("prompt", "is missing; send prompt or messages")
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens", "is for prompts: the chat template writes its own; leave it out"
            )
        return ChatBody.of(fields, ignored)


class DetokenizeBody(JsonBody):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    tokens: list[int]
    """Token ids; at most the model's context."""


BodyT = TypeVar("BodyT", TokenizeBody, DetokenizeBody, CountBody)


class TokenizeApi:
    def __init__(self, gateway: Gateway, keys: ApiKeys, calls: OpenCalls) -> None:
        self._gateway = gateway
        self._keys = keys
        self._calls = calls
        self.routes = [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    @asynccontextmanager
    async def _body(self, request: Request, kind: type[BodyT]) -> AsyncIterator[tuple[Caller, BodyT]]:
        """Surrounds a call: authenticates, and reads the body. Raises InvalidRequestError, GatewayError."""
        caller = self._keys.authenticate(authorization(request.headers))
        with self._calls.hold(caller):
            body = parse_json(kind, await read_body(request, self._gateway))
            self._gateway.check_model(body.model or "")
            yield caller, body

    async def _tokenize(self, request: Request) -> JSONResponse:
        async with self._body(request, TokenizeBody) as (caller, body):
            tokens = await until_disconnect(request.receive, self._tokens(request, caller, body))
        tokenizer = self._gateway.tokenizer
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._gateway.manifest.max_model_len,
                "tokens": tokens,
                "token_strs": [tokenizer.piece(t) for t in tokens] if body.return_token_strs else None,
            }
        )

    async def _tokens(self, request: Request, caller: Caller, body: TokenizeBody) -> list[int]:
        chat = body.chat(ignored := self._ignored(request))
        if chat is None:
            return await self._gateway.count_text(
                caller, body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        return await self._tokens_of_chat(request, caller, chat, ignored)

    async def _tokens_of_chat(
        self, request: Request, caller: Caller, chat: ChatBody, ignored: Ignored
    ) -> list[int]:
        received = ReceivedRequest(
            request_id=request.state.request_id, caller=caller, model="", sampling={}, slo_class="",
            arrived=time.monotonic(),
        )  # fmt: skip
        options = chat.chat_options(self._gateway.tokenizer.template_variables, ignored)
        tools = chat.chosen_tools(ignored)
        return await self._gateway.encode_chat(received, chat.chat_messages(), tools, options)

    async def _count_tokens(self, request: Request) -> JSONResponse:
        """Counts the tokens of a prompt, as in Anthropic's API."""
        async with self._body(request, CountBody) as (caller, body):
            ignored = self._ignored(request, CountBody.field_names)
            try:
                counting = self._tokens_of_chat(request, caller, body.checked(ignored), ignored)
                tokens = await until_disconnect(request.receive, counting)
            except InvalidRequestError as error:
                rename(error, CountBody.field_names)
                raise
        return JSONResponse({"input_tokens": len(tokens)})

    def _ignored(self, request: Request, names: Mapping[str, str] | None = None) -> Ignored:
        ignored = Ignored(is_strict=self._gateway.settings.strict_fields, names=names)
        request.state.ignored = ignored
        return ignored

    async def _detokenize(self, request: Request) -> JSONResponse:
        async with self._body(request, DetokenizeBody) as (_, body):
            self._ignored(request).unknown("", body.model_extra)
            manifest, tokens = self._gateway.manifest, body.tokens
            if len(tokens) > manifest.max_model_len:
                raise InvalidRequestError(
                    "tokens",
                    f"are {len(tokens)}, over the model's context of {manifest.max_model_len}; send fewer",
                )
            check_token_ids("tokens", tokens, manifest.vocab_size)
            decode = self._gateway.tokenizer.decode
            text = await asyncio.to_thread(decode, tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})
