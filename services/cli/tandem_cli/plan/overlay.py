"""A kustomize overlay with a plan's numbers, on the base or an overlay of deploy/k8s."""

from __future__ import annotations

from pathlib import Path

from tandem_cli.plan.search import Result

_KUSTOMIZATION = """\
# Written by `tandem plan`. To deploy: kubectl apply -k with the path of this folder.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: tandem
resources:
  - {base}
replicas:
  - name: tandem-prefill
    count: {num_prefill}
  - name: tandem-decode
    count: {num_decode}
configMapGenerator:
  - name: tandem-prefill-settings
    behavior: merge
    literals:
      - TANDEM_CHUNK_SIZE={chunk_size}
  - name: tandem-decode-settings
    behavior: merge
    literals:
      - TANDEM_CHUNK_SIZE={chunk_size}
      - TANDEM_MAX_BATCH={max_batch}
      - TANDEM_NUM_BLOCKS={num_blocks}
      - TANDEM_LOCAL_PREFILL_TOKENS={local_prefill_tokens}
      - TANDEM_IDLE_PREFILL_TOKENS={idle_prefill_tokens}
"""


def write_overlay(folder: Path, base: str, result: Result) -> Path:
    """Writes the kustomization to a folder that has none yet. Raises OSError."""
    from tandem_decode.settings import DecodeSettings

    plan = result.plan
    text = _KUSTOMIZATION.format(
        base=base,
        num_prefill=plan.num_prefill,
        num_decode=plan.num_decode,
        chunk_size=plan.chunk_size,
        max_batch=plan.max_batch,
        num_blocks=plan.costs.kv_tokens // DecodeSettings.model_fields["block_size"].default,
        local_prefill_tokens=plan.local_prefill_tokens,
        idle_prefill_tokens=plan.idle_prefill_tokens,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kustomization.yaml"
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path
