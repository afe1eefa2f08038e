"""A step's inputs on a GPU: buffers at fixed addresses, filled by one asynchronous copy a step.

    staging (host, pinned)   rows [5, R] int64 | seq_lens [S] | query_start_loc [S + 1] | used block table
    arena (device)           the same; a step reads its first rows and sequences
    block table [S, W]       its used rows and columns, from the arena's

R, S and W are the most rows, sequences and blocks of a sequence. Every part begins at a multiple of 16 bytes,
whatever the step: where one did not, Triton would compile its kernels anew. For the same reason the block
table has the same stride in all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tandem_core.errors import InvariantError
from tandem_kernels import AttentionMetadata
from torch import Tensor

from tandem_engine import device_copies
from tandem_engine.models.decoder import ModelInputs


class StaticInputs:
    """The buffers for steps of at most max_rows rows of max_seqs sequences; any device."""

    def __init__(self, max_rows: int, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.max_rows, self.max_seqs, self.max_blocks = max_rows, max_seqs, max_blocks
        self._rows_end = 5 * _aligned(max_rows * 8)
        self._lens_end = self._rows_end + _aligned(max_seqs * 4)
        self._seqs_end = self._lens_end + _aligned((max_seqs + 1) * 4)
        num_bytes = self._seqs_end + max_seqs * max_blocks * 4
        self._source = device_copies.staging(num_bytes, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # The host writes through numpy, whose small assignments take a fifth of torch's time.
        self._staging = self._source.numpy()
        self._host_rows = self._staging[: self._rows_end].view(np.int64).reshape(5, -1)
        self._host_seq_lens = self._staging[self._rows_end : self._lens_end].view(np.int32)
        self._host_starts = self._staging[self._lens_end : self._seqs_end].view(np.int32)
        self._arena = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._rows = self._arena[: self._rows_end].view(torch.int64).view(5, -1)
        self._seq_lens = self._arena[self._rows_end : self._lens_end].view(torch.int32)
        self._starts = self._arena[self._lens_end : self._seqs_end].view(torch.int32)
        self._block_table = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)

    def load(
        self,
        step: ModelInputs,
        scratch_slot: int,
        logits_rows: Sequence[int] | None = None,
        *,
        num_rows: int | None = None,
        num_seqs: int | None = None,
    ) -> None:
        """Copies a step of CPU tensors, padded to num_rows and num_seqs; on CUDA asynchronously.

        Padding rows are token 0 at position 0, with KV to the scratch slot; padding sequences have no tokens
        and no keys.
        """
        metadata = step.attention
        table = metadata.block_table
        used_rows, (used_seqs, width) = len(step.input_ids), table.shape
        num_rows, num_seqs = num_rows or used_rows, num_seqs or used_seqs
        if used_rows > num_rows or num_rows > self.max_rows or width > self.max_blocks:
            raise InvariantError(
                f"a step of {used_rows} rows and {width} blocks a sequence; there is room for {num_rows} of "
                f"{self.max_rows} rows and {self.max_blocks} blocks"
            )
        if used_seqs > num_seqs or num_seqs > self.max_seqs:
            raise InvariantError(
                f"a step of {used_seqs} sequences; there is room for {num_seqs} of {self.max_seqs}"
            )
        if self._copied is not None:
            # The previous step's copy may still read the staging memory.
            self._copied.synchronize()
        rows = self._host_rows
        rows[:, used_rows:num_rows] = 0
        rows[2, used_rows:num_rows] = scratch_slot
        rows[0, :used_rows] = step.input_ids.numpy()
        rows[1, :used_rows] = step.positions.numpy()
        rows[2, :used_rows] = step.slot_mapping.numpy()
        rows[3, :used_rows] = 0 if metadata.ancestor_bits is None else metadata.ancestor_bits.numpy()
        if logits_rows is not None:
            rows[4, : len(logits_rows)] = logits_rows
        self._host_seq_lens[:used_seqs] = metadata.seq_lens.numpy()
        self._host_seq_lens[used_seqs:num_seqs] = 0
        self._host_starts[: used_seqs + 1] = metadata.query_start_loc.numpy()
        self._host_starts[used_seqs + 1 : num_seqs + 1] = used_rows

        end = self._seqs_end + table.nbytes
        self._staging[self._seqs_end : end].view(np.int32)[:] = table.numpy().reshape(-1)
        self._arena[:end].copy_(self._source[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        used = self._arena[self._seqs_end : end].view(torch.int32).view(used_seqs, width)
        self._block_table[:used_seqs, :width].copy_(used)

    def view(self, num_rows: int, num_seqs: int) -> ModelInputs:
        """What a step of this padded size reads; always the same memory."""
        input_ids, positions, slot_mapping, ancestor_bits, _ = self._rows.unbind()
        return ModelInputs(
            input_ids[:num_rows],
            positions[:num_rows],
            slot_mapping[:num_rows],
            AttentionMetadata(
                self._block_table[:num_seqs],
                self._seq_lens[:num_seqs],
                self._starts[: num_seqs + 1],
                ancestor_bits[:num_rows],
            ),
        )

    def logits_rows(self, num: int) -> Tensor:
        """The first of the loaded logits_rows: [num] int64."""
        return self._rows[4, :num]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
