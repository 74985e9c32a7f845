# SPDX-License-Identifier: Apache-2.0
"""The shapes that are timed: V4.1's widths, at the batches and contexts that a rank meets.

A shape names its figures. `<figure>/vs-<rival>` is the rival's time over ours; a shape bound by memory, or by the link to
the host, reports `floor-fraction`, one bound by arithmetic `mma-fraction`; attention reports `relative-error` against float64.
"""

import functools
from dataclasses import dataclass, replace

import torch

from vllm.ampere import pinned_memory
from vllm.ampere.cache_layout import ENGRAM_DIM, ENGRAM_SCALES
from vllm.ampere.expert_layout import down_inputs
from vllm.ampere.kernels.moe.mxfp4_experts_decode import ARRIVAL_COUNTERS
from vllm.ampere.kernels.registry import Case, all_ops
from vllm.ampere.testing.inputs import ascending_lists, card_view, kv_pages, normal

FLOOR, MMA, ERROR = "floor-fraction", "mma-fraction", "relative-error"
WINDOW, TOPK = 128, 512
# FlashMLA wants pages that start at a multiple of this.
_PAGE_ALIGN_BYTES = 576


@dataclass(frozen=True)
class Shape:
    """One row of the table.

    Attributes:
        figure: "<op or family>/<case>", what its figures' ids begin with.
        op: name in the registry.
        case: sizes under the op's own names, so that its bytes and flops count them, and how to make inputs.
        measures: last parts of its figures' ids, besides time and launches.
        eager: calls are timed one by one, with the host's time, instead of as a graph.
        link_bytes: what must cross from host memory, where that is the floor; 0 where the card's memory is.
    """

    figure: str
    op: str
    case: Case
    measures: tuple[str, ...]
    eager: bool = False
    link_bytes: int = 0

    @property
    def rivals(self) -> tuple[str, ...]:
        """Who it is compared with."""
        return tuple(m.removeprefix("vs-") for m in self.measures if m.startswith("vs-"))

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the figures that `measures` names."""
        return tuple(f"{self.figure}/{measure}" for measure in self.measures)

    def shrunken(self, **sizes) -> "Shape":
        """The same with other sizes, for a test of its inputs."""
        return replace(self, case=replace(self.case, sizes={**self.case.sizes, **sizes}))


def _aligned_pages(generator, rows: int, page_rows: int, device) -> torch.Tensor:
    stride_bytes = -(-page_rows * 584 // _PAGE_ALIGN_BYTES) * _PAGE_ALIGN_BYTES
    return kv_pages(generator, 1 + -(-rows // page_rows), page_rows, stride_bytes, device)


def attention_inputs(sizes, generator, device):
    """Full lists: each window contiguous, the selected rows spread over a pool of `C` rows.

    In a decode step a token has a window of its own; in a prefill (`chunk`) the windows slide by a token.
    """
    tokens, heads, window, selected = (sizes[axis] for axis in "THWK")
    step = 1 if sizes["chunk"] else window
    first = torch.arange(tokens) * step + sizes["P"]
    rows = torch.rand(tokens, sizes["C"], generator=generator).topk(selected, 1).indices + sizes["Q"]
    return {
        "q": normal(generator, tokens, heads, 512, device=device, scale=2.0),
        "sink": normal(generator, heads, dtype=torch.float32, device=device),
        "scale": 512**-0.5,
        "window_cache": _aligned_pages(generator, (tokens - 1) * step + window, sizes["P"], device),
        "window_slots": (first[:, None] + torch.arange(window)).int().to(device),
        "window_lens": torch.full((tokens,), window, dtype=torch.int32, device=device),
        "compressed_cache": _aligned_pages(generator, sizes["C"], sizes["Q"], device),
        "compressed_slots": rows.int().to(device),
        "compressed_lens": torch.full((tokens,), selected, dtype=torch.int32, device=device),
    }


def _attention(figure: str, op: str, tokens: int, heads: int, pool: int, measures) -> Shape:
    sizes = {"T": tokens, "H": heads, "W": WINDOW, "K": TOPK, "P": 32, "Q": 64, "C": pool}
    sizes["chunk"] = op == "sparse_mla_prefill"
    family = "sparse_mla_pages" if sizes["chunk"] else op
    return Shape(f"{family}/{figure}", op, Case(figure, sizes, attention_inputs), measures)


def gathered_inputs(sizes, generator, device):
    """A chunk of one request: each token's window slides by a row behind a pool of `C` rows, of which it selects."""
    tokens, heads, window, pool = (sizes[axis] for axis in "THWC")
    recent = pool + torch.arange(tokens)[:, None] + torch.arange(window)
    chosen = torch.rand(tokens, pool, generator=generator).topk(sizes["L"] - window, 1).indices
    return {
        "q": normal(generator, tokens, heads, 512, device=device, scale=2.0),
        "sink": normal(generator, heads, dtype=torch.float32, device=device),
        "scale": 512**-0.5,
        "rows": normal(generator, pool + tokens + window - 1, 512, device=device),
        "indices": torch.cat([chosen, recent], 1).int().to(device),
        "lens": torch.full((tokens,), sizes["L"], dtype=torch.int32, device=device),
    }


def _gathered(tokens: int, heads: int, *measures: str) -> Shape:
    figure, sizes = f"t{tokens}-h{heads}", {"T": tokens, "H": heads, "W": WINDOW, "L": WINDOW + TOPK, "C": 16_384}
    return Shape(f"sparse_mla_prefill/{figure}", "sparse_mla_rows", Case(figure, sizes, gathered_inputs), measures)


def _own(op: str, figure: str, sizes, *measures: str, family: str = "", make=None) -> Shape:
    """A shape with the inputs of the op's own cases."""
    return Shape(f"{family or op}/{figure}", op, Case(figure, sizes, make or all_ops()[op].cases[0].make), measures)


def _all_visible(sizes, generator, device):
    given = all_ops()["mqa_logits"].cases[0].make(sizes, generator, device)
    return given | {
        "starts": torch.zeros_like(given["starts"]),
        "ends": torch.full_like(given["ends"], sizes["S"]),
    }


def _decode_rows(sizes, generator, device):
    """T / R consecutive query tokens a request; the last sees all S keys."""
    given = all_ops()["paged_mqa_logits"].cases[0].make(sizes, generator, device)
    rows = sizes["T"] // sizes["R"]
    token = torch.arange(sizes["T"], device=device)
    return given | {
        "request": (token // rows).int(),
        "visible": (sizes["S"] - rows + 1 + token % rows).int(),
        "width": sizes["S"],
    }


def _listed(sizes, generator, device):
    """One token a request, which sees all S keys and lists L blocks."""
    given = all_ops()["candidate_mqa_logits"].cases[0].make(sizes, generator, device)
    blocks = -(-sizes["S"] // sizes["block_size"])
    counts = torch.full((sizes["T"],), sizes["L"])
    return given | {
        "request": torch.arange(sizes["T"], dtype=torch.int32, device=device),
        "visible": torch.full_like(given["visible"], sizes["S"]),
        "candidates": ascending_lists(generator, counts, blocks, sizes["L"]).to(device),
    }


def _scores(sizes, generator, device):
    return {"scores": normal(generator, sizes["T"], sizes["S"], dtype=torch.float32, device=device), "k": sizes["K"]}


# Ranks of a layout: (intermediate size, experts, ranks that share the experts).
EXPERTS = {"tp8": (288, 384, 1), "tp4": (576, 384, 1), "tp2": (1152, 384, 1), "ep8": (2304, 48, 8)}


@functools.lru_cache(maxsize=1)
def _expert_weights(experts: int, hidden: int, inner: int, device: str) -> dict[str, torch.Tensor]:
    """One layer's, of all inputs of a shape: what rotates is which experts the tokens choose."""
    generator, held = torch.Generator().manual_seed(0), down_inputs(inner)

    def words(*shape):
        return torch.empty(shape, dtype=torch.int32).random_(-(2**31), 2**31 - 1, generator=generator).to(device)

    def scales(*shape):
        return torch.empty(shape, dtype=torch.uint8).random_(118, 124, generator=generator).to(device)

    made = {
        "w13": words(experts, hidden // 16, 4 * inner), "w13_scale": scales(experts, hidden // 32, 2 * inner),
        "w2": words(experts, held // 16, 2 * hidden), "w2_scale": scales(experts, held // 32, hidden),
    }  # fmt: skip
    made["w2"][:, inner // 16 :], made["w2_scale"][:, inner // 32 :] = 0, 0
    return made


def _chosen_experts(sizes, generator, device):
    """Tokens that choose evenly among the experts of all ranks; every R-th is on this one."""
    experts, ranks, hidden = sizes["E"], sizes["R"], sizes["D"]
    everywhere = experts * ranks
    ids = torch.rand(sizes["T"], everywhere, generator=generator).argsort(-1)[:, : sizes["K"]]
    number = torch.arange(everywhere)
    owner = torch.where(number % ranks == 0, number // ranks, -1).int()
    return {
        "x": normal(generator, sizes["T"], hidden, device=device),
        **_expert_weights(experts, hidden, sizes["I"], str(device)),
        "topk_weights": torch.rand(sizes["T"], sizes["K"], generator=generator).to(device),
        "topk_ids": ids.int().contiguous().to(device),
        "out": torch.empty(sizes["T"], hidden, dtype=torch.bfloat16, device=device),
        "arrived": torch.zeros(ARRIVAL_COUNTERS, dtype=torch.int32, device=device),
        "limit": 10.0,
        "expert_map": owner.to(device) if ranks > 1 else None,
    }


def _experts(layout: str, tokens: int) -> Shape:
    inner, experts, ranks = EXPERTS[layout]
    sizes = {"T": tokens, "E": experts, "D": 5120, "I": inner, "K": 6, "R": ranks}
    measures = ("vs-marlin", "vs-marlin-least-padding", FLOOR)
    return _own("mxfp4_experts_decode", f"{layout}-m{tokens}", sizes, *measures, family="mxfp4_experts",
                make=_chosen_experts)  # fmt: skip


def _paged(requests: int, rows: int, label: str, keys: int, *measures: str) -> Shape:
    sizes = {"T": requests * rows, "N": 32, "R": requests, "P": 64, "S": keys}
    return _own("paged_mqa_logits", f"bs{requests}-q{rows}-{label}", sizes, *measures, make=_decode_rows)


def _inside(label: str, keys: int, *measures: str) -> Shape:
    sizes = {"T": 8, "N": 32, "R": 8, "P": 64, "S": keys, "L": 2048, "block_size": 8}
    return _own("candidate_mqa_logits", label, sizes, *measures, family="mqa_logits", make=_listed)


def _draft_block(requests: int, mode: str) -> Shape:
    """Five steps over the model's vocabulary: greedy ones, or with noise and the logits recorded."""
    sizes = {"R": requests, "S": 5, "V": 129_280, "F": 256, "drafts": "noise" in mode}
    shape = _own("markov_sampler", f"bs{requests}-{mode}", sizes, "vs-upstream-loop", "vs-inside", FLOOR)
    return replace(shape, eager=mode == "eager")


@functools.lru_cache(maxsize=1)
def _host_table(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of one table in pinned memory, or ordinary memory where there is no card."""
    size = rows * (ENGRAM_DIM + ENGRAM_SCALES)
    packed = pinned_memory.allocate(size) if torch.cuda.is_available() else torch.empty(size, dtype=torch.uint8)
    codes = packed[: rows * ENGRAM_DIM].view(rows, ENGRAM_DIM)
    scales = packed[rows * ENGRAM_DIM :].view(rows, ENGRAM_SCALES)
    generator = torch.Generator().manual_seed(0)
    # Drawing every byte takes long; a prime number of rows, again and again, repeats at no power of two.
    drawn = min(rows, 999_983)
    some_codes = torch.empty(drawn, ENGRAM_DIM, dtype=torch.uint8).random_(0, 127, generator=generator)
    some_scales = torch.empty(drawn, ENGRAM_SCALES, dtype=torch.uint8).random_(110, 135, generator=generator)
    for first in range(0, rows, drawn):
        count = min(drawn, rows - first)
        codes[first : first + count], scales[first : first + count] = some_codes[:count], some_scales[:count]
    return codes, scales


def _hashed_rows(sizes, generator, device):
    """Fresh tokens: rows of a host table that nobody has read."""
    table, scales = _host_table(sizes["R"])
    if torch.device(device).type == "cuda":
        table, scales = (card_view(held, device) for held in (table, scales))
    return {
        "table": table,
        "scales": scales,
        "rows": torch.randint(sizes["R"], (sizes["T"], sizes["C"]), generator=generator).to(device),
        "first_row": 0,
        "end_row": sizes["R"],
    }


def _engram(tokens: int) -> Shape:
    """All 24 columns, as one rank without tensor parallelism has them; 12 million rows are 2.95 GiB."""
    sizes = {"T": tokens, "C": 24, "R": 12_000_000}
    measures = ("vs-upstream", "vs-inline", FLOOR) if tokens == 8192 else ("vs-upstream",)
    shape = _own("engram_lookup", f"t{tokens}", sizes, *measures, make=_hashed_rows)
    return replace(shape, link_bytes=tokens * sizes["C"] * (ENGRAM_DIM + ENGRAM_SCALES))


def all_shapes() -> tuple[Shape, ...]:
    """The whole table."""
    attention = ("vs-portable-bf16", "vs-flashmla")
    decode = [
        _attention(f"bs{b}-h{h}", "sparse_mla_decode", b, h, 2 * b * TOPK, (*attention, FLOOR, ERROR))
        for b in (1, 8, 32, 64) for h in (8, 16, 32, 64)
    ]  # fmt: skip
    prefill = [_gathered(t, h, *attention, MMA, ERROR) for t in (1024, 8192) for h in (8, 64)]
    pages = [_attention(f"t1024-h{h}", "sparse_mla_prefill", 1024, h, 16_384, ("vs-gathered", MMA, ERROR)) for h in (8, 64)]
    merge = [_own("merge_attn_states", f"s{s}", {"S": s, "T": 1, "H": 64}, "vs-empty-kernel", "vs-one-load") for s in (2, 8, 16)]
    gather = [
        _own("gather_dequant", f"ctx{k}k", {"lengths": [k * 1024], "P": 64, "tail": None}, "vs-upstream-triton", "vs-copy", FLOOR)
        for k in (16, 48)
    ]
    insert = {"T": 8192, "S": 8192, "B": 8192 // 32 + 1, "P": 32, "stride": 19_008}
    stores = [
        _own("window_insert", "t8192", insert, FLOOR),
        _own("compressor_insert", "t8192", insert | {"ratio": 1}, FLOOR),
        _own("key_norm_rope_store", "t8192", {"T": 8192, "P": 64, "M": 4096, "ratio": 1}, "vs-copy", FLOOR),
        _own("query_rope_quant", "t8192", {"T": 8192, "N": 32, "M": 4096}, FLOOR),
    ]
    mhc = [
        _own(op, f"t{t}", {"T": t, "D": 5120} | more, FLOOR)
        for op, more in (("mhc_post", {}), ("mhc_collapse", {})) for t in (32, 8192)
    ]  # fmt: skip
    boundary = [
        _own("mhc_post_pre", f"t{t}", {"T": t, "D": 5120, "aux": False}, "vs-upstream-tilelang", "vs-upstream-torch",
             FLOOR, family="mhc_fused_post_pre")
        for t in (1, 6, 12, 32, 64, 512, 8192)
    ]  # fmt: skip
    combine = {"lengths": [1536], "C": TOPK, "ratio": 1, "window": WINDOW}
    indexer = [
        _own("combine_topk_swa", "t1536", combine, "vs-torch", "vs-upstream"),
        _own("mqa_logits", "m8192-n32k", {"M": 8192, "N": 32, "S": 32_768}, "vs-deepgemm", MMA, make=_all_visible),
        *(
            _paged(b, 1, f"ctx{k}k", k * 1024, "vs-deepgemm", FLOOR)
            for b in (1, 8, 32) for k in (8, 64)
        ),
        *(_paged(1, 6, f"ctx{k}k", k * 1024, "vs-flattened", "vs-deepgemm", FLOOR) for k in (64, 512)),
        _inside("candidate-only", 65_536, "vs-dense", FLOOR),
        *(_inside(f"candidate-only-ctx{k}k", k * 1024, FLOOR) for k in (32, 256)),
        _own("select_topk", "n1m", {"T": 1, "S": 1 << 20, "C": 2048, "K": TOPK}, "vs-upstream", "vs-torch", FLOOR,
             family="candidate_topk", make=_scores),
    ]  # fmt: skip
    experts = [_experts(layout, tokens) for layout in EXPERTS for tokens in (1, 6, 16)]
    sampler = [_draft_block(b, mode) for b in (1, 8) for mode in ("eager", "graph", "noise-graph")]
    engram = [_engram(t) for t in (1, 6, 32, 8192)]
    return (*decode, *prefill, *pages, *merge, *gather, *stores, *mhc, *boundary, *indexer, *experts, *sampler, *engram)
