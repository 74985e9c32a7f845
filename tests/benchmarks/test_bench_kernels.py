# SPDX-License-Identifier: Apache-2.0
"""The table of shapes and the order of checking and timing, on the CPU with shapes made small."""

import itertools
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_kernels, bounds, rivals
from benchmarks.bench_kernels import (
    SETS,
    Findings,
    add_figures,
    check_cases,
    check_shape,
    lowered_for,
    measure,
    same_work,
)
from benchmarks.shapes import ERROR, all_shapes
from vllm.ampere.kernels.registry import all_ops
from vllm.ampere.testing.parity import produce
from vllm.ampere.testing.timing import SAMPLES, Spread

SHAPES = {shape.figure: shape for shape in all_shapes()}


def _expected(text):
    """The ids of "a/{b,c}/d"."""
    parts = [part.split(",") for part in text.replace("{", "|").replace("}", "|").split("|")]
    # Outside braces a part has no comma.
    return {"".join(chosen) for chosen in itertools.product(*parts)}


FIGURES = (
    "merge_attn_states/{s2,s8,s16}/{vs-empty-kernel,vs-one-load}",
    "sparse_mla_prefill/{t1024,t8192}-{h8,h64}/{vs-portable-bf16,vs-flashmla,mma-fraction,relative-error}",
    "sparse_mla_pages/t1024-{h8,h64}/vs-gathered",
    "candidate_topk/n1m/vs-upstream",
    "engram_lookup/t8192/floor-fraction",
    "engram_lookup/{t1,t6,t32}/vs-upstream",
    "{window_insert,key_norm_rope_store,query_rope_quant,compressor_insert}/t8192/floor-fraction",
    "sparse_mla_decode/{bs1,bs8,bs32}-{h8,h64}/{vs-portable-bf16,vs-flashmla,floor-fraction,relative-error}",
    "gather_dequant/{ctx16k,ctx48k}/{vs-upstream-triton,floor-fraction}",
    "combine_topk_swa/t1536/{vs-torch,vs-upstream}",
    "mqa_logits/m8192-n32k/{vs-deepgemm,mma-fraction}",
    "mqa_logits/candidate-only/vs-dense",
    "paged_mqa_logits/{bs1,bs8,bs32}-q1-{ctx8k,ctx64k}/vs-deepgemm",
    "paged_mqa_logits/bs1-q6-{ctx64k,ctx512k}/{vs-flattened,vs-deepgemm,floor-fraction}",
    "mxfp4_experts/{tp8,tp4,tp2,ep8}-{m1,m6,m16}/{vs-marlin,floor-fraction}",
    "mhc_fused_post_pre/{t1,t6,t12,t8192}/{vs-upstream-tilelang,floor-fraction}",
    "markov_sampler/{bs1,bs8}-{eager,graph}/vs-upstream-loop",
)
# Sizes small enough for a CPU; an axis that a shape lacks is left out.
SMALL = {"T": 6, "S": 24, "M": 16, "B": 4, "N": 4, "K": 16, "C": 64, "W": 16, "D": 256, "H": 4}


@pytest.mark.parametrize("text", FIGURES)
def test_every_promised_figure_has_a_shape(text):
    have = {figure for shape in SHAPES.values() for figure in shape.ids}
    assert _expected(text) <= have


def test_figures_are_named_once_and_their_rivals_exist():
    assert len(SHAPES) == len(all_shapes())
    for shape in SHAPES.values():
        against = {rival.against for rival in rivals.rivals_of(shape.op, shape.rivals)}
        assert against == set(shape.rivals), shape.figure
    for rival in rivals.RIVALS:
        assert any(rival in rivals.rivals_of(shape.op, shape.rivals) for shape in SHAPES.values()), rival.name


def test_sets_name_ops_once_and_only_ones_that_exist():
    named = [name for names in SETS.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= all_ops().keys()
    assert {shape.op for shape in SHAPES.values()} <= set(named)


def _small(shape):
    sizes = {axis: SMALL[axis] for axis in shape.case.sizes if axis in SMALL}
    if shape.op in ("window_insert", "compressor_insert"):
        sizes |= {"S": 6}
    if shape.op == "query_rope_quant":
        sizes |= {"M": 4096}
    if shape.op == "paged_mqa_logits":
        sizes |= {"T": shape.case.sizes["T"] // shape.case.sizes["R"] * 2, "R": 2, "S": 130}
    if shape.op == "candidate_mqa_logits":
        sizes |= {"R": 6, "S": 130, "L": 5}
    if shape.op == "mxfp4_experts_decode":
        sizes = {"E": 4, "D": 256, "I": 96, "K": 3}
    if shape.op == "markov_sampler":
        sizes |= {"S": 5, "V": 97, "F": 16}
    if shape.op == "sparse_mla_rows":
        sizes |= {"L": 32}
    if shape.op == "engram_lookup":
        sizes = {"T": 6, "R": 500}
    if "lengths" in shape.case.sizes:
        sizes |= {"lengths": [70]}
    if shape.op == "merge_attn_states":
        sizes |= {"S": shape.case.sizes["S"]}
    return shape.shrunken(**sizes)


@pytest.mark.parametrize("figure", SHAPES)
def test_inputs_can_be_made_and_the_reference_agrees_with_itself(figure):
    shape = _small(SHAPES[figure])
    op = all_ops()[shape.op]
    error, reference = check_shape(op, op.reference, shape, "cpu")
    # Attention's is the rounding of its result: the reference here is in float64.
    assert (0 < error < 3.3e-3) if ERROR in shape.measures else error == 0
    assert reference.double().isfinite().any()
    assert op.bytes_moved(shape.case.sizes) > 0


@pytest.mark.parametrize("figure", ["sparse_mla_decode/bs8-h8", "sparse_mla_pages/t1024-h8"])
def test_attention_lists_are_full_and_name_rows_past_the_null_page(figure):
    given = _small(SHAPES[figure]).case.inputs(5)
    for source in ("window", "compressed"):
        cache, slots = given[f"{source}_cache"], given[f"{source}_slots"]
        assert cache.stride(0) % 576 == 0
        assert (given[f"{source}_lens"] == slots.shape[1]).all()
        assert slots.min() >= cache.shape[1] and slots.max() < cache.shape[0] * cache.shape[1]
        assert all(len(row.unique()) == len(row) for row in slots)


def test_workspace_of_the_rivals_holds_the_same_attention():
    """Softmax over the dequantised workspace, written out, equals the op's own reference."""
    given = _small(SHAPES["sparse_mla_decode/bs8-h8"]).case.inputs(7)
    kv, indices, lens = rivals._workspace(given)
    assert (lens == indices.shape[2]).all()
    rows = kv[:, 0].double()[indices[:, 0].long()]
    logits = torch.einsum("thd,tkd->thk", given["q"].double(), rows) * given["scale"]
    sink = given["sink"].double()[None, :, None].expand(len(logits), -1, 1)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    want = all_ops()["sparse_mla_decode"].reference(**given, dtype=torch.float64)
    torch.testing.assert_close(torch.einsum("thk,tkd->thd", weights, rows), want, rtol=1e-9, atol=1e-9)


def _wrong(op):
    def function(**given):
        found = op.reference(**given)
        found = found if isinstance(found, torch.Tensor) else found[0]
        found.view(-1)[0] += 1
        return found

    return function


def test_a_wrong_kernel_leaves_a_failure_and_no_figure():
    shape = _small(SHAPES["merge_attn_states/s8"])
    op, findings = all_ops()[shape.op], Findings()

    def time(*_):
        raise AssertionError("timed")

    assert not measure(shape, findings, lambda: check_shape(op, _wrong(op), shape, "cpu"), time)
    assert not findings.figures and "worst element" in findings.failures[shape.figure]
    check_cases(op, _wrong(op), findings, "cpu")
    assert findings.checked == len(op.cases) and len(findings.failures) >= len(op.cases)


def test_a_fault_while_timing_takes_the_shapes_figures_back():
    shape = SHAPES["merge_attn_states/s8"]
    findings = Findings()
    findings.add("merge_attn_states/s16/time", 1.0, "us")

    def time(*_):
        findings.add(f"{shape.figure}/time", 1.0, "us")
        raise RuntimeError("the card stopped")

    assert not measure(shape, findings, lambda: (0.0, None), time)
    assert [f["id"] for f in findings.figures] == ["merge_attn_states/s16/time"]


def test_figures_of_a_shape():
    """The fastest of the rivals that share a word counts; fractions are the floor's time over ours."""
    shape = SHAPES["candidate_topk/n1m"]
    op, findings = all_ops()[shape.op], Findings()
    spreads = {"ours": 10.0, "top_k_per_row_prefill": 40.0, "top_k_per_row_decode": 30.0, "torch-topk": 90.0}
    against = {r.name: r.against for r in rivals.rivals_of(shape.op, shape.rivals)}
    floor_s = 2e-6
    ceilings = {"copy_bytes_per_s": op.bytes_moved(shape.case.sizes) / floor_s}
    spreads = {name: Spread(us, us, us) for name, us in spreads.items()}
    add_figures(shape, op, spreads, against, 0.0, 3, ceilings, findings)
    assert {f["id"].removeprefix("candidate_topk/n1m/"): f["value"] for f in findings.figures} == {
        "time": 10.0, "launches": 3, "vs-upstream": 3.0, "vs-torch": 9.0, "floor-fraction": 0.2,
    }  # fmt: skip


def test_floor_of_a_lookup_is_the_link_to_the_host():
    """264 bytes a row, over the rate of a copy from pinned memory; memory of the card does not count."""
    shape, findings = SHAPES["engram_lookup/t8192"], Findings()
    ceilings = {"copy_bytes_per_s": 1e15, "host_copy_bytes_per_s": 25e9}
    spreads = {"ours": Spread(4000.0, 4000.0, 4000.0)}
    add_figures(shape, all_ops()[shape.op], spreads, {}, 0.0, 1, ceilings, findings)
    value = {f["id"]: f["value"] for f in findings.figures}["engram_lookup/t8192/floor-fraction"]
    assert value == pytest.approx(8192 * 24 * 264 / 25e9 / 4e-3, rel=1e-3)


class _Replay:
    """Stands for a graph: the first made takes 10 us a call, the second 20, and so on."""

    made = 0

    def __init__(self, calls):
        for call in calls:
            call()
        _Replay.made += 1
        self.us = 10.0 * _Replay.made

    def __call__(self):
        return self.us


@pytest.fixture
def without_a_card(monkeypatch):
    """`time_shape` as it is, with the clock and the cache of a card that is not there."""
    monkeypatch.setattr(_Replay, "made", 0)
    for name in ("GraphReplay", "EagerCalls"):
        monkeypatch.setattr(bench_kernels, name, _Replay)
    monkeypatch.setattr(bench_kernels, "launches", lambda call: call() is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=30_000))


def _time(figure):
    shape, findings = _small(SHAPES[figure]), Findings()
    op = all_ops()[shape.op]
    ceilings = {"copy_bytes_per_s": 1e9, "mma_flops_per_s": 1e9}
    error, reference = check_shape(op, op.reference, shape, "cpu")
    bench_kernels.time_shape(op, op.reference, shape, error, reference, ceilings, nullcontext, findings, "cpu")
    return {f["id"].rpartition("/")[2]: f["value"] for f in findings.figures}, findings


def test_a_rival_that_cannot_run_is_listed_and_the_others_are_timed(without_a_card):
    values, findings = _time("combine_topk_swa/t1536")
    assert values["vs-torch"] == 2.0 and "vs-upstream" not in values
    assert findings.absent == {"combine_topk_swa/t1536: upstream": "there is no card"}
    assert findings.samples["combine_topk_swa/t1536"] == {"ours": [10.0] * SAMPLES, "torch": [20.0] * SAMPLES}


def test_a_rival_with_another_result_is_not_compared(without_a_card, monkeypatch):
    halved = rivals.Rival("half", "flattened", ("paged_mqa_logits",), lambda given: (
        lambda: all_ops()["paged_mqa_logits"].reference(**given), lambda logits: logits * 0.5), lambda: "")  # fmt: skip
    monkeypatch.setattr(rivals, "RIVALS", (halved,))
    values, findings = _time("paged_mqa_logits/bs1-q6-ctx64k")
    assert "vs-flattened" not in values and values["floor-fraction"] > 0
    assert "off by 5.0e-01" in findings.absent["paged_mqa_logits/bs1-q6-ctx64k: half"]


def test_topk_rivals_are_compared_by_score_where_rows_tie():
    op = all_ops()["select_topk"]
    given = {"scores": torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])}
    want = torch.tensor([[1, 2]], dtype=torch.int32)
    assert same_work(op, torch.tensor([[2, 3]], dtype=torch.int32), want, given) == 0.0
    assert same_work(op, torch.tensor([[0, 3]], dtype=torch.int32), want, given) > 0.1


def test_flattened_rival_gives_the_same_logits():
    shape = _small(SHAPES["paged_mqa_logits/bs1-q6-ctx64k"])
    op = all_ops()[shape.op]
    given = shape.case.inputs(3)
    call, result = rivals._flattened(given)
    assert given["visible"].tolist() == list(range(125, 131)) * 2
    torch.testing.assert_close(result(call()), produce(op, op.reference, given)["logits"], rtol=1e-5, atol=1e-5)


def test_dense_rival_gives_the_same_listed_logits():
    shape = _small(SHAPES["mqa_logits/candidate-only"])
    op = all_ops()[shape.op]
    given = shape.case.inputs(3)
    given["candidates"][0, -1] = 16  # the last block, which is cut
    call, result = rivals._dense(given)
    assert (call() == -torch.inf).any() and (given["candidates"] >= 0).all()
    assert torch.equal(result(call()), produce(op, op.reference, given)["logits"])


def test_lowering_is_set_for_ours_and_taken_back(monkeypatch):
    monkeypatch.setenv("VLLM_AMPERE_ASSUME", "sm86")
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    with lowered_for("sm80", native=False):
        assert os.environ["VLLM_AMPERE_ASSUME"] == os.environ["TRITON_OVERRIDE_ARCH"] == "sm80"
    assert os.environ["VLLM_AMPERE_ASSUME"] == "sm86" and "TRITON_OVERRIDE_ARCH" not in os.environ


def test_rivals_that_cannot_run_here_say_why():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    for rival in rivals.RIVALS:
        if rival.against not in ("torch", "flattened", "dense", "inline", "empty-kernel", "one-load", "copy", "inside", "gathered"):
            assert rival.requires() == "there is no card", rival.name


def test_shapes_by_pattern():
    chosen = {shape.figure for shape in bench_kernels.matching(["sparse_mla_decode/bs64-*", "merge*"])}
    assert chosen == {f"sparse_mla_decode/bs64-h{h}" for h in (8, 16, 32, 64)} | {f"merge_attn_states/s{s}" for s in (2, 8, 16)}
    assert not bench_kernels.matching(["nothing"])


@pytest.mark.parametrize("figure, copy", [("gather_dequant/ctx16k", bounds.copy_of_rows), ("key_norm_rope_store/t8192", bounds.copy_of_keys)])
def test_a_copy_moves_what_the_op_moves(figure, copy, monkeypatch):
    shape, asked = SHAPES[figure], []
    monkeypatch.setattr(bounds, "_copy", lambda op, sizes, device: asked.append(all_ops()[op].bytes_moved(sizes)))
    copy(shape.case.inputs(0))
    assert asked == [all_ops()[shape.op].bytes_moved(shape.case.sizes)]
