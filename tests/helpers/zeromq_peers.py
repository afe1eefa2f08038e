"""One end of the ZeroMQ wire, made by hand, for tests of the other end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zmq
from kv_groups import kv_group
from tandem_engine.transport.base import MAX_FRAME_BYTES, Ticket
from tandem_engine.transport.codec import Frame, Message, decode, digest, encode
from tandem_engine.transport.layout import KVLayout

LAYOUT = KVLayout(
    model_revision="abc",
    dtype="float16",
    kv_quantization="none",
    groups=(kv_group(range(2), 1, 8),),
    block_size=16,
    spec="0123456789abcdef",
)
BLOCK = LAYOUT.max_block_bytes
WAIT_MS = 5000


class ByteStore:
    """Sixteen blocks in one numpy array; counts what is written."""

    max_frame_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.data = np.zeros((LAYOUT.num_layers, 16, BLOCK), np.uint8)
        self.num_scatters = 0

    def mark(self) -> None:
        return None

    def gather(self, layer: int, block_ids: Sequence[int], after: object = None) -> np.ndarray:
        return self.data[layer, list(block_ids)]

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object = None
    ) -> None:
        self.num_scatters += 1
        self.data[layer, list(block_ids)] = np.frombuffer(payload, np.uint8).reshape(len(block_ids), BLOCK)


class RawSender:
    """A DEALER without the sender's code: sends any bytes to a receiver, without CURVE or with `keys`."""

    def __init__(self, endpoint: str, keys: tuple[bytes, bytes, bytes] | None = None) -> None:
        """`keys`: the server's public one, then the client's public and secret ones, in Z85."""
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        # A receiver that refuses the keys takes the connection away, and a message waits for another one.
        self._dealer.sndtimeo = WAIT_MS
        if keys is not None:
            self._dealer.curve_serverkey, self._dealer.curve_publickey, self._dealer.curve_secretkey = keys
        self._dealer.connect(endpoint)

    def send(self, *parts: bytes) -> None:
        self._dealer.send_multipart(parts)

    def reply(self) -> Message:
        assert self._dealer.poll(WAIT_MS), "no reply"
        return decode(self._dealer.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


class RawReceiver:
    """A ROUTER without the receiver's code: takes frames, and answers only when a test calls it."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.ticket = Ticket(
            transfer_id=b"0123456789abcdef",
            epoch=1,
            endpoint=f"tcp://127.0.0.1:{port}",
            public_key="",
            layout_fingerprint=LAYOUT.fingerprint,
            layout_description=LAYOUT.description,
            wanted_blocks=(tuple(range(8)),),
            credit_bytes=8 * BLOCK,
        )
        self.peers: set[bytes] = set()

    def frames(self, quiet_ms: int = 100) -> list[tuple[Frame, bytes]]:
        """Frames that arrive until none did for `quiet_ms`."""
        frames = []
        wait_ms = WAIT_MS
        while self._router.poll(wait_ms):
            peer, header, payload = self._router.recv_multipart()
            message = decode(header)
            assert isinstance(message, Frame)
            self.peers.add(peer)
            frames.append((message, payload))
            wait_ms = quiet_ms
        return frames

    def is_quiet(self, for_ms: int) -> bool:
        return not self._router.poll(for_ms)

    def answer(self, message: Message) -> None:
        for peer in self.peers:
            self._router.send_multipart([peer, encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=0)


def frame_for(
    ticket: Ticket,
    payload: bytes,
    *,
    layer: int = 0,
    first_block: int = 0,
    num_blocks: int = 1,
    epoch: int = 1,
) -> Frame:
    place = (ticket.transfer_id, ticket.epoch, layer, first_block, num_blocks)
    return Frame(*place, digest(*place, memoryview(payload)))
