"""`tandem chat`: a conversation in the terminal over gRPC.

you> text    one Chat call; shows text, TTFT and TPOT as it arrives
Ctrl-C       cancels the running answer (the history keeps its text so far); at the prompt: exits
/help        lists the commands (chat_commands.py)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_sync_channel

from tandem_cli import chat_commands
from tandem_cli.options import ChatOptions
from tandem_cli.targets import GatewayError, explain, key_metadata, served_model

_NS_PER_MS = 1e6
_NS_PER_S = 1e9
#: Exit code after Ctrl-C, as in shells.
EXIT_INTERRUPTED = 130


#: Time within which a restarted gateway, or another one behind the same address, should answer.
_RESUME_LIMIT_S, _RESUME_INTERVAL_S = 15.0, 0.5


@dataclass
class Answer:
    """An answer so far. Times are in seconds since the request was sent."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    last_token_s: float = 0.0
    receipt: common_pb2.Receipt | None = None
    finish_reason: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None before the second."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.ttft_s) / (self.num_tokens - 1)

    def status(self) -> str:
        if self.ttft_s is None:
            return "waiting for the first token"
        shown = f"TTFT {self.ttft_s:.2f} s"
        if self.tpot_s is not None:
            shown += f", TPOT {self.tpot_s * 1000:.1f} ms"
        return f"{shown}, {self.num_tokens} tokens"


@dataclass
class Conversation:
    """Connection and history; `ask` appends the question and the answer."""

    options: ChatOptions
    stub: gateway_pb2_grpc.GatewayServiceStub
    messages: list[gateway_pb2.ChatMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.system = self.options.system or ""

    @property
    def system(self) -> str:
        """The system prompt; "": none."""
        first = self.messages[0] if self.messages else None
        return first.content if first is not None and first.role == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        del self.messages[: 1 if self.system else 0]
        if text:
            self.messages.insert(0, gateway_pb2.ChatMessage(role="system", content=text))

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        del self.messages[1 if self.system else 0 :]

    def ask(self, text: str) -> Iterator[Answer]:
        """Yields one Answer, updated after each message of the stream. Resumes an interrupted stream.

        Raises GatewayError. Closing the iterator cancels the call; the history keeps the text so far.
        """
        self.messages.append(gateway_pb2.ChatMessage(role="user", content=text))
        sampling = common_pb2.SamplingParams(
            max_tokens=self.options.max_tokens,
            temperature=self.options.temperature,
            seed=self.options.seed,
        )
        request = gateway_pb2.ChatRequest(
            messages=self.messages,
            sampling=sampling,
            slo_class=self.options.slo_class,
            speculation=self.options.speculation or "",
        )
        answer = Answer()
        started = time.monotonic()
        try:
            for response in self._responses(request):
                self._take(answer, response, time.monotonic() - started)
                yield answer
        finally:
            if answer.text:
                self.messages.append(gateway_pb2.ChatMessage(role="assistant", content=answer.text))
            else:
                # Without an answer there would be two consecutive user turns, which chat templates refuse.
                self.messages.pop()

    def _responses(self, request: gateway_pb2.ChatRequest) -> Iterator[gateway_pb2.ChatResponse]:
        """The messages of the stream. Raises GatewayError. Closing the iterator cancels the call."""
        event_id = ""
        give_up_at = 0.0
        while True:
            call = self.stub.Chat(request, metadata=key_metadata(self.options.api_key))
            try:
                for response in call:
                    event_id = response.chunk.event_id or response.end.event_id
                    give_up_at = time.monotonic() + _RESUME_LIMIT_S
                    yield response
                return
            except grpc.RpcError as error:
                is_cut = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
                if not (is_cut and event_id and time.monotonic() < give_up_at):
                    raise GatewayError(explain(error, self.options.target)) from error
            finally:
                call.cancel()
            time.sleep(_RESUME_INTERVAL_S)
            request = gateway_pb2.ChatRequest(last_event_id=event_id)

    @staticmethod
    def _take(answer: Answer, response: gateway_pb2.ChatResponse, elapsed_s: float) -> None:
        if response.WhichOneof("event") == "end":
            answer.receipt = response.end.receipt
            answer.finish_reason = common_pb2.FinishReason.Name(response.end.reason)
            return
        answer.text += response.chunk.text
        if response.chunk.token_ids:
            answer.num_tokens += len(response.chunk.token_ids)
            answer.last_token_s = elapsed_s
            if answer.ttft_s is None:
                answer.ttft_s = elapsed_s


def open_stub(channel: grpc.Channel) -> gateway_pb2_grpc.GatewayServiceStub:
    return gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]


def ask_once(options: ChatOptions, text: str) -> int:
    """Asks one question; writes the answer to stdout, the receipt to stderr. Raises GatewayError."""
    with open_public_sync_channel(options.target, options.ca) as channel:
        conversation = Conversation(options, open_stub(channel))
        written = 0
        answer = Answer()
        stream = conversation.ask(text)
        try:
            for answer in stream:
                sys.stdout.write(answer.text[written:])
                sys.stdout.flush()
                written = len(answer.text)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator
            sys.stdout.write("\n" if written else "")
        if answer.receipt is not None:
            print(describe_receipt(answer.receipt), file=sys.stderr)
    return 0


def converse(options: ChatOptions) -> int:
    """Runs the conversation until the user exits. Raises GatewayError first if no gateway answers."""
    model = served_model(options.target, options.ca, options.api_key)
    console = Console()
    with open_public_sync_channel(options.target, options.ca) as channel:
        conversation = Conversation(options, open_stub(channel))
        hint = f"{model} at {options.target}. Ctrl-C cancels an answer, /help lists commands, /exit leaves."
        console.print(hint, style="dim", markup=False, highlight=False)
        while True:
            try:
                line = console.input("[bold cyan]you>[/] ").rstrip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return 0
            if not line.startswith("/"):
                if text := line.strip():
                    _show_answer(console, conversation, text)
                continue
            reply = chat_commands.run(conversation, line)
            if reply is None:
                return 0
            console.print(reply, style="dim", markup=False, highlight=False)


def _show_answer(console: Console, conversation: Conversation, text: str) -> None:
    answer = Answer()
    stream = conversation.ask(text)
    cancelled = False
    num_printed = 0
    try:
        with Live(console=console, refresh_per_second=12) as live:
            try:
                for answer in stream:
                    # Print whole lines once: a terminal cannot redraw lines that have scrolled off.
                    end = answer.text.rfind("\n") + 1
                    if end > num_printed:
                        live.console.print(Text(answer.text[num_printed : end - 1]))
                        num_printed = end
                    live.update(Group(Text(answer.text[num_printed:]), Text(answer.status(), style="dim")))
            except KeyboardInterrupt:
                cancelled = True
            live.update(Text(answer.text[num_printed:]))
    except GatewayError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return
    finally:
        stream.close()  # type: ignore[attr-defined]  # a generator
    if cancelled:
        console.print("(cancelled)", style="yellow")
    if answer.receipt is not None:
        console.print(describe_receipt(answer.receipt), style="dim", markup=False, highlight=False)
    else:
        console.print(answer.status(), style="dim", highlight=False)


def describe_receipt(receipt: common_pb2.Receipt) -> str:
    """Three lines: times, tokens, SLO."""
    steps = receipt.decode_steps
    per_step = f", {(receipt.output_tokens - 1) / steps:.2f} per step" if steps else ""
    sources = ", ".join(f"{name} {count}" for name, count in sorted(receipt.accepted_by_source.items()))
    pods = " -> ".join(pod for pod in (receipt.prefill_pod, receipt.decode_pod) if pod)
    slo = f"SLO {receipt.slo.name}: " if receipt.slo.name else "SLO: "
    slo += (
        "met" if receipt.slo_met else f"missed ({receipt.slo_miss_reason}; cause: {receipt.slo_miss_cause})"
    )
    retries = f", {receipt.prefill_retries} prefill retries" if receipt.prefill_retries else ""
    retries += f", {receipt.decode_retries} decode retries" if receipt.decode_retries else ""
    return "\n".join(
        (
            f"TTFT {receipt.ttft_ns / _NS_PER_S:.3f} s, E2E {receipt.e2e_ns / _NS_PER_S:.3f} s"
            f"; queue {receipt.queue_ns / _NS_PER_MS:.0f} + prefill {receipt.prefill_ns / _NS_PER_MS:.0f}"
            f" + transfer {receipt.transfer_ns / _NS_PER_MS:.0f}"
            f" + decode {receipt.decode_ns / _NS_PER_MS:.0f} ms; {pods}{retries}",
            f"prompt {receipt.prompt_tokens} tokens ({receipt.cached_tokens} cached), output"
            f" {receipt.output_tokens} in {steps} steps{per_step};"
            f" drafted {receipt.drafted_tokens}, accepted {receipt.accepted_tokens}"
            + (f" ({sources})" if sources else ""),
            f"{slo}; seed {receipt.seed}",
        )
    )
