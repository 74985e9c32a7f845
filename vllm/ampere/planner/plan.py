# SPDX-License-Identifier: Apache-2.0
"""One layout on one box: what every card and node holds, what remains for the cache, and why it is refused."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..errors import UsageError
from ..model_spec import ModelSpec
from .inventory import Inventory, LinkKind
from .kv_blocks import KvBlocks, token_bytes
from .latency import REDUCTIONS_PER_LAYER, StepTime, all_reduce_us, decode_step
from .memory import GIB, Positive, Serving, workspace_bytes
from .pipeline import Stage, copied_source, crossing_bytes, stages
from .weights import RankWeights, WeightTable, host_bytes


class Layout(BaseModel):
    """How a model is dealt out.

    Attributes:
        tensor: ranks of each stage's tensor group.
        partition: layers of each pipeline stage.
        expert_parallel: a rank of the group holds whole experts, not a slice of each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: Positive
    partition: tuple[Positive, ...] = Field(min_length=1)
    expert_parallel: bool = False

    @property
    def cards(self) -> int:
        return self.tensor * len(self.partition)

    def __str__(self) -> str:
        return f"TP{self.tensor}xPP{len(self.partition)}" + "+EP" * self.expert_parallel


@dataclass(frozen=True)
class StagePlan:
    """One card of one stage.

    Attributes:
        stage, weights: its layers and their bytes.
        workspace: bytes by purpose.
        free_bytes: what remains for the cache; negative where nothing does.
        block_bytes: of one cache block.
        missing_bytes: what one request of the wanted context lacks; 0 where it fits.
        crossing_bytes: of one token to the next stage, the tensor group together; 0 on the last.
        token_bytes: of one token in the compressed caches, the copied one included.
        copied_layer: the KV source of an earlier stage whose rows are sent here and kept a second time, or None.
    """

    stage: Stage
    weights: RankWeights
    workspace: dict[str, int]
    free_bytes: int
    block_bytes: int
    missing_bytes: int
    crossing_bytes: int
    token_bytes: float
    copied_layer: int | None

    @property
    def blocks(self) -> int:
        """Cache blocks that fit."""
        return max(self.free_bytes, 0) // self.block_bytes


@dataclass(frozen=True)
class Plan:
    """A layout on a box.

    Attributes:
        layout, inventory, serving: what was asked.
        stages: a card of each stage; empty where the layout itself is impossible.
        refusals: why it cannot run, one line each; empty where it can.
        warnings: what will hurt.
        host_bytes: pinned host memory of each node; `host_rounded_bytes` is the same without huge pages.
        blocks, capacity_tokens, concurrency, longest_context: of the cache; the stage with the fewest blocks decides.
        step: time of a decode step of one request.
    """

    layout: Layout
    inventory: Inventory
    serving: Serving
    stages: tuple[StagePlan, ...] = ()
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    host_bytes: tuple[int, ...] = ()
    host_rounded_bytes: tuple[int, ...] = ()
    blocks: int = 0
    capacity_tokens: int = 0
    concurrency: float = 0.0
    longest_context: int = 0
    step: StepTime | None = None

    @property
    def missing_bytes(self) -> int:
        """What the tightest card lacks."""
        return max((stage.missing_bytes for stage in self.stages), default=0)

    def document(self) -> dict[str, Any]:
        """All of it as JSON values; sizes in bytes."""
        return {
            "layout": self.layout.model_dump(),
            "fits": not self.refusals,
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
            "stages": [
                {
                    "layers": [each.stage.start, each.stage.end - 1],
                    "weight_bytes": vars(each.weights) | {"total": each.weights.total},
                    "workspace_bytes": each.workspace,
                    "free_bytes": each.free_bytes,
                    "missing_bytes": each.missing_bytes,
                    "block_bytes": each.block_bytes,
                    "blocks": each.blocks,
                    "token_bytes": each.token_bytes,
                    "crossing_bytes_per_token": each.crossing_bytes,
                    "copied_layer": each.copied_layer,
                }
                for each in self.stages
            ],
            "host_bytes": list(self.host_bytes),
            "host_rounded_bytes": list(self.host_rounded_bytes),
            "kv": {
                "blocks": self.blocks,
                "capacity_tokens": self.capacity_tokens,
                "concurrency": round(self.concurrency, 2),
                "longest_context": self.longest_context,
            },
            "step_ms": vars(self.step) | {"total": self.step.total} if self.step else None,
        }

    @property
    def relayed(self) -> bool:
        """A stage starts inside a group of layers that share a cache."""
        return any(stage.copied_layer is not None for stage in self.stages)

    def environment(self) -> dict[str, str]:
        """Variables that the server's processes need."""
        if len(self.layout.partition) == 1:
            return {}
        return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.layout.partition))}

    def arguments(self) -> list[str]:
        """Arguments of `vllm serve`."""
        serving = self.serving
        words = ["--tensor-parallel-size", str(self.layout.tensor)]
        words += ["--pipeline-parallel-size", str(len(self.layout.partition))]
        words += ["--enable-expert-parallel"] * (self.layout.expert_parallel and self.layout.tensor > 1)
        words += ["--max-model-len", str(serving.context), "--max-num-batched-tokens", str(serving.batched_tokens)]
        words += ["--max-num-seqs", str(serving.requests), "--gpu-memory-utilization", str(serving.memory_fraction)]
        if any(self.host_bytes):
            words += ["--engram-config", _json(cpu_offload=True, use_thp=serving.huge_pages)]
        if serving.draft_tokens:
            words += ["--speculative-config", _json(method="dspark", num_speculative_tokens=serving.draft_tokens)]
        if not serving.images:
            words += ["--limit-mm-per-prompt", _json(image=0)]
        return words


def make_plan(table: WeightTable, inventory: Inventory, layout: Layout, serving: Serving) -> Plan:
    """Plan one layout.

    Raises:
        UsageError: the partition does not deal out the model's layers, or the context is longer than the model's.
    """
    spec = table.spec
    if serving.context > spec.max_position_embeddings:
        raise UsageError(
            f"a context of {serving.context} tokens is more than the model's {spec.max_position_embeddings}",
            f"ask for --context {spec.max_position_embeddings} or less",
        )
    cut = stages(spec, layout.partition)
    serving = serving.of(spec)
    impossible = _impossible(spec, inventory, layout)
    if impossible:
        return Plan(layout, inventory, serving, refusals=tuple(impossible))
    # One batch a stage, and one more that is being scheduled.
    kv = KvBlocks(spec, serving.draft_tokens, (len(cut) + 1) * serving.batched_tokens)
    planned = tuple(plan_stage(table, inventory, layout, serving, kv, stage) for stage in cut)
    blocks = min(each.blocks for each in planned)
    host, rounded = (_hosts(spec, inventory, layout, pages, cut) for pages in (serving.huge_pages, False))
    step = decode_step(
        spec, cut, [each.weights for each in planned], inventory, layout.tensor, layout.expert_parallel,
        1 + serving.draft_tokens, bool(serving.draft_tokens), serving.context,
    )
    plan = Plan(
        layout, inventory, serving, planned, (), (), host, rounded, blocks,
        kv.capacity_tokens(blocks, serving.context), kv.concurrency(blocks, serving.context),
        kv.longest_context(blocks), step,
    )
    return replace(plan, refusals=tuple(_memory_refusals(plan)), warnings=tuple(_warnings(plan, spec)))


def _impossible(spec: ModelSpec, inventory: Inventory, layout: Layout) -> list[str]:
    found = []
    if spec.o_groups % layout.tensor:
        found.append(f"TP{layout.tensor} cannot share {spec.o_groups} output groups: TP must divide {spec.o_groups}")
    if layout.cards > inventory.total:
        found.append(f"{layout} takes {layout.cards} cards, there are {inventory.total}")
    return found


def plan_stage(
    table: WeightTable, inventory: Inventory, layout: Layout, serving: Serving, kv: KvBlocks, stage: Stage
) -> StagePlan:
    """One card of a stage; of `layout` only the tensor group is read."""
    draft = bool(serving.draft_tokens)
    weights = table.rank(stage, layout.tensor, layout.expert_parallel, draft, serving.images)
    workspace = workspace_bytes(table.spec, stage, layout.tensor, layout.expert_parallel, serving)
    budget = int(inventory.card_gib * serving.memory_fraction * GIB)
    free = budget - weights.total - sum(workspace.values())
    block = kv.block_bytes(stage)
    missing = max(0, kv.request_blocks(serving.context) * block - free)
    crossing = 0 if stage.last else crossing_bytes(table.spec, stage.end, draft, context=serving.context)
    copied, _ = copied_source(table.spec, stage) or (None, False)
    return StagePlan(stage, weights, workspace, free, block, missing, crossing, token_bytes(table.spec, stage), copied)


def _hosts(
    spec: ModelSpec, inventory: Inventory, layout: Layout, huge_pages: bool, cut: tuple[Stage, ...]
) -> tuple[int, ...]:
    """Pinned bytes of each node; a tensor group that spans nodes pins its even share on each."""
    hosts = [0] * inventory.nodes
    for number, stage in enumerate(cut):
        cards = range(number * layout.tensor, (number + 1) * layout.tensor)
        whole = host_bytes(spec, stage, layout.tensor, huge_pages)
        for card in cards:
            hosts[card // inventory.cards] += whole // layout.tensor
    return tuple(hosts)


def _memory_refusals(plan: Plan) -> list[str]:
    found = []
    for each in plan.stages:
        if each.missing_bytes:
            where = f"layers {each.stage.start}-{each.stage.end - 1}"
            budget = plan.inventory.card_gib * plan.serving.memory_fraction
            used = f"weights {each.weights.total / GIB:.1f} and workspace {sum(each.workspace.values()) / GIB:.1f}"
            longest = f"; {plan.longest_context} tokens fit" if plan.longest_context else ""
            found.append(
                f"a card with {where} lacks {each.missing_bytes / GIB:.2f} GiB for one request of "
                f"{plan.serving.context} tokens: {used} of {budget:.1f} GiB{longest}"
            )
    limit = plan.inventory.host_gib
    for node, pinned in enumerate(plan.host_bytes):
        if limit is not None and pinned > limit * GIB:
            found.append(f"node {node} pins {pinned / GIB:.1f} GiB for engram tables, it may pin {limit:.1f}")
    return found


def _warnings(plan: Plan, spec: ModelSpec) -> list[str]:
    found = []
    tensor, inventory = plan.layout.tensor, plan.inventory
    if plan.step.group is LinkKind.NETWORK:
        each = all_reduce_us(inventory.link_between(0, inventory.cards), tensor, spec.hidden_size * 2)
        count = REDUCTIONS_PER_LAYER * spec.num_hidden_layers
        found.append(
            f"a tensor group spans nodes: {count} reductions x {each:.0f} us = {count * each / 1e3:.1f} ms a step; "
            "put pipeline stages on nodes instead"
        )
    if plan.serving.draft_tokens not in (0, spec.dspark_block_size):
        found.append(
            f"a draft of {plan.serving.draft_tokens} tokens: the checkpoint drafts {spec.dspark_block_size}, and others "
            "have been reported to be accepted less"
        )
    if not plan.serving.huge_pages and any(plan.host_bytes):
        found.append("without use_thp each pinned engram table takes a power of two of host memory")
    return found


def _json(**values: Any) -> str:
    return json.dumps(values, separators=(",", ":"))
