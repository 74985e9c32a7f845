# SPDX-License-Identifier: Apache-2.0
"""Card memory besides weights and KV cache: what a server allocates to run a step.

Buffers whose shape the engine fixes are counted from it; `activations` is an estimate of what is alive at once.
CUDA context, NCCL and captured graphs cannot be counted: they are inputs of `Serving`, with defaults that a
measurement should replace.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..cache_layout import HEAD_DIM, ROPE_DIM, SCORE_BUDGET_BYTES, rotary_rows
from ..model_spec import STREAMS, ModelSpec
from .pipeline import Stage, relay_latents

GIB = 2**30
# Copies of the four streams alive at once in a layer: residual, its update, and one in float32.
_LIVE_STREAM_BYTES = 2 + 2 + 4

Positive = Annotated[int, Field(gt=0)]


class Serving(BaseModel):
    """How the server is run.

    Attributes:
        context: longest request, tokens (`--max-model-len`).
        batched_tokens: tokens of one step (`--max-num-batched-tokens`).
        requests: requests of one step (`--max-num-seqs`).
        draft_tokens: tokens that DSpark proposes a step; 0 leaves the draft out.
        images: the vision tower is loaded.
        huge_pages: engram tables on transparent huge pages (`use_thp`).
        memory_fraction: share of a card that vLLM may use (`--gpu-memory-utilization`).
        gather_requests: longest requests whose cache a prefill gathers into a bfloat16 workspace at once; stock
            vLLM uses 4.
        graphs_gib, runtime_gib: captured CUDA graphs; CUDA context and NCCL buffers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    context: Positive = 1 << 20
    batched_tokens: Positive = 8192
    requests: Positive = 32
    draft_tokens: Annotated[int, Field(ge=0)] = 5
    images: bool = True
    huge_pages: bool = True
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.92
    gather_requests: Annotated[int, Field(ge=0)] = 1
    graphs_gib: Annotated[float, Field(ge=0)] = 1.0
    runtime_gib: Annotated[float, Field(ge=0)] = 1.25

    def of(self, spec: ModelSpec) -> "Serving":
        """The same of a model, which may have no draft."""
        return self if spec.num_nextn_predict_layers else self.model_copy(update={"draft_tokens": 0})

    @property
    def rows(self) -> int:
        """Rows of a full decode step: every request's next token and its draft."""
        return min(self.requests * (1 + self.draft_tokens), self.batched_tokens)


def rotary_bytes(spec: ModelSpec, stage: Stage, serving: Serving) -> int:
    """The rotary tables of a stage; the draft's layers do not compress."""
    ratios = [layer.ratio for layer in spec.layers[stage.start : stage.end]]
    tables = any(ratios) + (0 in ratios or (stage.last and serving.draft_tokens > 0))
    rows = min(rotary_rows(serving.context, serving.batched_tokens), spec.max_position_embeddings)
    return tables * rows * ROPE_DIM * 4


def workspace_bytes(
    spec: ModelSpec, stage: Stage, tensor: int, expert_parallel: bool, serving: Serving
) -> dict[str, int]:
    """Bytes of each workspace on each rank of a stage.

    Keys:
        gather: bfloat16 rows of a prefill.
        logits: the indexer's float32 scores, prefill chunk or decode step, the larger.
        selection: chosen rows and candidate blocks of a step's tokens, int32.
        activations: the residual streams, the experts' products and the vocabulary's logits.
        draft: what DSpark is fed with, a row of the hidden size a token.
        rotary: cosines and sines of every position, float32, one table for layers that compress and one for others.
        relay: latents of a step, bfloat16, that a relayed cut takes from this stage, brings to it, or both.
        graphs, runtime: as given.
    """
    tokens = serving.batched_tokens
    ratios = [layer.ratio for layer in spec.layers[stage.start : stage.end] if layer.ratio]
    rows = -(-serving.context // min(ratios)) if ratios else 0
    window = spec.sliding_window + tokens
    scores = max(SCORE_BUDGET_BYTES, serving.rows * rows * 4) if ratios else 0
    chosen = spec.index_topk + (spec.candidate_topk_blocks if spec.candidate_source_layer_id >= 0 else 0)
    streams = tokens * STREAMS * spec.hidden_size
    intermediate = spec.moe_intermediate_size // (1 if expert_parallel else tensor)
    experts = tokens * spec.num_experts_per_tok * (3 * intermediate + spec.hidden_size) * 2
    vocabulary = 2 * serving.rows * spec.vocab_size * 4 if stage.last else 0
    return {
        "gather": serving.gather_requests * (rows + window) * HEAD_DIM * 2,
        "logits": scores,
        "selection": tokens * chosen * 4 if ratios else 0,
        "activations": streams * _LIVE_STREAM_BYTES + max(experts, vocabulary),
        "draft": tokens * spec.hidden_size * 2 if stage.last and serving.draft_tokens else 0,
        "rotary": rotary_bytes(spec, stage, serving),
        "relay": relay_latents(spec, stage) * tokens * HEAD_DIM * 2,
        "graphs": int(serving.graphs_gib * GIB),
        "runtime": int(serving.runtime_gib * GIB),
    }
