# SPDX-License-Identifier: Apache-2.0
"""How to divide the layers over pipeline stages: for the largest cache, for prefill, for decode.

A pipeline is as fast as its busiest stage and holds as many requests as its tightest card. So each search is for the
partition whose worst stage is best: over all partitions, stage after stage, from the best ways to reach its start.
"""

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Iterable, Iterator

from ..model_spec import ModelSpec
from .inventory import Inventory, LinkKind
from .kv_blocks import KvBlocks
from .latency import stage_chunk_ms, stage_step
from .memory import Serving
from .pipeline import Stage, plain_cuts
from .plan import Layout, Plan, StagePlan, make_plan, plan_stage
from .weights import WeightTable

# Partitions whose busiest stages are this near to each other are as fast as each other; the cache decides.
_NEAR = 1.01
# What drivers report of cards sold as 40, 48, 64 and 80 GB.
CARD_GIB = (39.39, 47.4, 63.3, 79.15)
# What common boxes are compared by.
SERVING = Serving(context=1 << 18, batched_tokens=4096)


def divide(
    layers: int,
    count: int,
    cuts: Iterable[int],
    cost: Callable[[int, Stage], float],
    combine: Callable[[float, float], float] = max,
) -> tuple[float, tuple[int, ...]] | None:
    """The partition of least cost, and that cost; None where there is none of finite cost.

    Args:
        layers, count: of the model and of the pipeline.
        cuts: layers, the first excepted, at which a stage may start.
        cost: of stage number n; infinite forbids it.
        combine: of the cost up to a stage and its own: max, or a sum.
    """
    bounds = [0, *sorted(cuts), layers]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (-math.inf if combine is max else 0.0, ())}
    for number in range(count):
        last = number == count - 1
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, partition) in best.items():
            for end in (bound for bound in bounds if bound > start and (bound == layers) == last):
                value = combine(before, cost(number, Stage(start, end, number == 0, last)))
                if value < found.get(end, (math.inf,))[0]:
                    found[end] = value, (*partition, end - start)
        best = found
    return best.get(layers)


@dataclass(frozen=True)
class Split:
    """A partition for one load.

    Attributes:
        plan: of it.
        per_second: what the load is counted in: prompt tokens, or steps of one request.
    """

    plan: Plan
    per_second: float


class Splits:
    """Partitions for one tensor group on a box.

    Args:
        table, inventory, serving: the model, the box, and how it is served.
        tensor, count: ranks of a group, and stages.
        expert_parallel: a rank holds whole experts.
        relayed: stages may start anywhere, and not only where the streams alone cross.
    """

    def __init__(
        self,
        table: WeightTable,
        inventory: Inventory,
        serving: Serving,
        tensor: int,
        count: int,
        expert_parallel: bool,
        relayed: bool = True,
    ):
        self.table, self.inventory, self.serving = table, inventory, serving.of(table.spec)
        self.tensor, self.count, self.expert_parallel = tensor, count, expert_parallel
        self._cuts = range(1, table.spec.num_hidden_layers) if relayed else plain_cuts(table.spec)
        self._kv = KvBlocks(table.spec, self.serving.draft_tokens, (count + 1) * serving.batched_tokens)
        self._planned: dict[Stage, StagePlan] = {}
        self._times: dict[tuple, dict[tuple, float]] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.table.spec

    def layout(self, partition: tuple[int, ...]) -> Layout:
        return Layout(tensor=self.tensor, partition=partition, expert_parallel=self.expert_parallel)

    @cached_property
    def largest_cache(self) -> tuple[int, ...] | None:
        """The partition with the most blocks; where none holds a request, the one that lacks least."""
        found = self._divide(self._tightness)
        return found and found[1]

    @cached_property
    def missing_bytes(self) -> float:
        """What the tightest card of that partition lacks; infinite where there are more stages than cuts allow."""
        found = self._divide(self._tightness)
        return max(0.0, found[0]) if found else math.inf

    def for_prefill(self) -> Split | None:
        """The partition that passes chunks of long prompts fastest; of those as fast, the one with the largest cache."""
        rows = self.serving.batched_tokens
        slowest = self._slowest(stage_chunk_ms, rows, 1)
        return slowest and self._split(stage_chunk_ms, rows, 1, slowest, rows)

    def for_decode(self) -> Split | None:
        """The partition that steps most requests in a time, if they are dealt out evenly over a batch a stage."""
        rates = []
        for requests in sorted({min(2**power, self.serving.requests) for power in range(11)}):
            rows = -(-requests // self.count) * (1 + self.serving.draft_tokens)
            if slowest := self._slowest(_step_ms, rows, requests):
                rates.append((requests / slowest, rows, requests, slowest))
        if not rates:
            return None
        _, rows, requests, slowest = max(rates)
        return self._split(_step_ms, rows, requests, slowest, requests / self.count)

    def _slowest(self, time: Callable[..., float], rows: int, requests: int) -> float | None:
        """Milliseconds of the busiest stage of the best partition that holds so many requests; None if none does."""
        found = self._divide(self._busy(time, rows, requests))
        return found and found[0]

    def _split(self, time: Callable[..., float], rows: int, requests: int, slowest: float, amount: float) -> Split:
        """Of the partitions as fast, one with the largest cache; of these, the one over whose cuts least is sent."""
        busy, slow = self._busy(time, rows, requests), slowest * _NEAR
        tightest, _ = self._divide(lambda *place: self._tightness(*place) if busy(*place) <= slow else math.inf)

        def crossing(number: int, stage: Stage) -> float:
            fits = busy(number, stage) <= slow and self._tightness(number, stage) <= tightest
            return float(self._plan(stage).crossing_bytes) if fits else math.inf

        _, partition = self._divide(crossing, operator.add)
        plan = make_plan(self.table, self.inventory, self.layout(partition), self.serving)
        return Split(plan, amount * 1e3 / max(busy(number, each.stage) for number, each in enumerate(plan.stages)))

    def _divide(self, cost, combine=max):
        return divide(self.spec.num_hidden_layers, self.count, self._cuts, cost, combine)

    def _plan(self, stage: Stage) -> StagePlan:
        if stage not in self._planned:
            layout = self.layout((self.spec.num_hidden_layers,))
            self._planned[stage] = plan_stage(self.table, self.inventory, layout, self.serving, self._kv, stage)
        return self._planned[stage]

    def _tightness(self, number: int, stage: Stage) -> float:
        """Less is better: bytes that a request lacks, or, below zero, the blocks of a card."""
        planned = self._plan(stage)
        return float(planned.missing_bytes or -planned.blocks)

    def _busy(self, time: Callable[..., float], rows: int, requests: int) -> Callable[[int, Stage], float]:
        """Milliseconds of a stage that holds so many requests; infinite for one that does not."""
        need = requests * self._kv.request_blocks(self.serving.context)
        known = self._times.setdefault((time, rows), {})

        def busy(number: int, stage: Stage) -> float:
            planned = self._plan(stage)
            if planned.blocks < need:
                return math.inf
            key = self._links[number], stage
            if key not in known:
                known[key] = time(
                    self.spec, number, stage, planned.weights, self.inventory, self.tensor, self.expert_parallel, rows,
                    bool(self.serving.draft_tokens), self.serving.context,
                )
            return known[key]

        return busy

    @cached_property
    def _links(self) -> list[tuple[LinkKind, LinkKind]]:
        """By stage, the links of its group and to the next stage: all of its place that times depend on."""
        kind, tensor, last = self.inventory.kind_between, self.tensor, self.inventory.total - 1
        starts = [number * tensor for number in range(self.count)]
        return [(kind(first, first + tensor - 1), kind(first, min(first + tensor, last))) for first in starts]


def _step_ms(*arguments) -> float:
    return stage_step(*arguments).total


def groups(spec: ModelSpec, cards: int) -> Iterator[tuple[int, int, bool]]:
    """(tensor, stages, expert parallel) of every layout that takes all cards and can share the output groups."""
    for tensor in range(cards, 0, -1):
        if cards % tensor == 0 and spec.o_groups % tensor == 0 and cards // tensor <= spec.num_hidden_layers:
            for experts in (False, True)[: 1 + (tensor > 1)]:
                yield tensor, cards // tensor, experts


@dataclass(frozen=True)
class Best:
    """The best partitions of a box over all tensor groups.

    Attributes:
        loads: by "prefill" and "decode"; empty where nothing fits.
        missing_bytes: what the tightest card then lacks in the layout that lacks least; 0 where something fits.
    """

    loads: dict[str, Split]
    missing_bytes: float


def best(table: WeightTable, inventory: Inventory, serving: Serving, relayed: bool) -> Best:
    """The best partitions of a box, relayed cuts among them or not."""
    everywhere = [Splits(table, inventory, serving, *group, relayed) for group in groups(table.spec, inventory.total)]
    fitting = [splits for splits in everywhere if not splits.missing_bytes]
    found = {"prefill": [each.for_prefill() for each in fitting], "decode": [each.for_decode() for each in fitting]}
    loads = {load: max(each, key=lambda split: split.per_second) for load, each in found.items() if each}
    return Best(loads, min((each.missing_bytes for each in everywhere), default=math.inf))


def common_boxes(table: WeightTable, serving: Serving) -> Iterator[tuple[Inventory, Best, Best]]:
    """Common boxes over PCIe, each with its best partitions without a relay and with one where that is better."""
    for cards in (4, 6, 8, 10, 16):
        for gib in CARD_GIB:
            nodes = 2 if cards > 10 else 1
            box = Inventory(nodes=nodes, cards=cards // nodes, card_gib=gib)
            plain, relayed = (best(table, box, serving, relay) for relay in (False, True))
            better = {
                load: split for load, split in relayed.loads.items()
                if load not in plain.loads or split.per_second > plain.loads[load].per_second * _NEAR
            }
            yield box, plain, Best(plain.loads | better, relayed.missing_bytes)
