"""A stand-in for any server with OpenAI's protocol, on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FakeOpenAI:
    """Streams two pieces of text, a usage chunk and possibly a receipt.

    The model "unknown" is refused with 404; the model "busy" is refused once with 429, retry-after 20 ms.
    """

    receipt: dict[str, object] = field(default_factory=dict)
    pause_s: float = 0.0
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def serving(self) -> Iterator[FakeOpenAI]:
        """Serves at `url`; yields itself."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeOpenAI

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.bodies.append(body)
        fake.headers.append({name.lower(): value for name, value in self.headers.items()})
        if body["model"] == "unknown":
            self.send_error(404, "no such model")
            return
        if body["model"] == "busy" and len(fake.bodies) == 1:
            self.send_response(429)
            self.send_header("retry-after", "1")
            self.send_header("retry-after-ms", "20")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage: dict[str, object] = {"prompt_tokens": 40, "completion_tokens": 6}
        if fake.receipt:
            usage["tandem_receipt"] = fake.receipt
        events: list[object] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "He"}}]},
            {"choices": [{"delta": {"content": "llo"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        for event in events:
            time.sleep(fake.pause_s)
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""
