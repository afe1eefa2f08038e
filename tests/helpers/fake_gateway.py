"""A stand-in for the gateway: the real service on loopback, with scripted answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from grpc_servers import serving
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


@dataclass
class Answer:
    """Chunks of text, one token per character, and a receipt; or a status with its details."""

    words: tuple[str, ...] = ()
    receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)
    failure: tuple[grpc.StatusCode, str] | None = None


REFUSAL = Answer(failure=(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full"))


@dataclass
class FakeGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Gives `answer` to each Chat, each chunk after `pause_s`."""

    answer: Answer
    #: Speculation mode -> the answer to requests for it.
    by_mode: dict[str, Answer] = field(default_factory=dict)
    pause_s: float = 0.0
    #: Requests whose number is a multiple of this are refused; 0: none.
    refuse_each: int = 0
    #: Retry-after of a refusal in milliseconds; 0: none.
    retry_after_ms: int = 0
    #: Chats end after this many chunks with UNAVAILABLE, unless they are resumed; 0: they do not.
    cut_after: int = 0
    #: Name of the served model; "": none is listed.
    model: str = ""
    target: str = ""
    requests: list[gateway_pb2.ChatRequest] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    cancelled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def serving(self) -> Iterator[FakeGateway]:
        """Serves at `target`; yields itself."""
        with serving(self, gateway_pb2_grpc.add_GatewayServiceServicer_to_server) as self.target:
            yield self

    def ListModels(self, request, context):  # noqa: N802
        models = [gateway_pb2.ModelInfo(name=self.model)] if self.model else []
        return gateway_pb2.ListModelsResponse(models=models)

    def Chat(self, request, context):  # noqa: N802
        with self._lock:
            self.requests.append(request)
            self.keys.append(dict(context.invocation_metadata()).get("authorization", ""))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            is_refused = self.refuse_each and len(self.requests) % self.refuse_each == 0
        answer = REFUSAL if is_refused else self.by_mode.get(request.speculation, self.answer)
        cancelled = threading.Event()
        context.add_callback(cancelled.set)
        context.send_initial_metadata((("x-request-id", "r-1"),))
        try:
            if answer.failure is not None:
                if self.retry_after_ms:
                    context.set_trailing_metadata((("retry-after-ms", str(self.retry_after_ms)),))
                context.abort(*answer.failure)
            num_seen = int(request.last_event_id or 0)
            for index, word in list(enumerate(answer.words, start=1))[num_seen:]:
                if cancelled.wait(self.pause_s):
                    return
                chunk = gateway_pb2.GeneratedChunk(text=word, token_ids=word.encode(), event_id=str(index))
                yield gateway_pb2.ChatResponse(chunk=chunk)
                if self.cut_after and index == self.cut_after and not num_seen:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
            yield gateway_pb2.ChatResponse(end=gateway_pb2.GeneratedEnd(receipt=answer.receipt))
        finally:
            with self._lock:
                self.running -= 1
                self.cancelled += cancelled.is_set()
