# SPDX-License-Identifier: Apache-2.0
"""The routed experts on Marlin: who takes them, how wide they lie in memory, and what the padding adds (nothing).

Marlin and its repacking run on a card only. Upstream's PyTorch repacking stands in for the operator here, and a product
with the weights that our own description of the layout finds in its result for Marlin.
"""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

import vllm._custom_ops as ops
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils import marlin_utils_test

from vllm.ampere.expert_layout import down_inputs
from vllm.ampere.integration import gate
from vllm.ampere.integration import marlin_experts as experts
from vllm.ampere.kernels.moe.marlin_layout import unpack, unpack_scales
from vllm.ampere.kernels.moe.mxfp4_experts import OP as PLAIN
from vllm.ampere.kernels.moe.reference import mxfp4_experts_ref
from vllm.ampere.kernels.quantization.reference import mxfp4_decode_ref
from vllm.ampere.kernels.registry import Tolerance
from vllm.ampere.testing.compare import assert_close
from tests.integration.test_gate import on_card  # noqa: F401

LIMIT = 10.0
DECODE = experts.DECODE.name
# Marlin stores gate and up, and each expert's row, in bfloat16.
MARLIN = Tolerance(1e-2, 1e-1)


def config(hidden=128, intermediate=96, **more):
    return FusedMoEConfig(**{
        "num_experts": 8, "experts_per_token": 3, "hidden_dim": hidden, "intermediate_size": intermediate,
        "num_local_experts": 4, "num_logical_experts": 8, "activation": MoEActivation.SILU, "device": "cpu",
        "routing_method": RoutingMethodType.DeepseekV4, "in_dtype": torch.bfloat16,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
    } | more)  # fmt: skip


def repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit, perm=None):
    """`gptq_marlin_repack` by upstream's own PyTorch code."""
    shifts = torch.arange(0, 32, 4)
    codes = (b_q_weight[:, None] >> shifts[None, :, None] & 15).reshape(size_k, size_n)
    order = marlin_utils_test.get_weight_perm(4)
    return marlin_utils_test.marlin_weights(codes, size_k, size_n, 4, order)


@pytest.fixture
def method(monkeypatch):
    """A loaded method: (method, layer, what was loaded) for experts of a shape."""
    chosen = (Mxfp4MoeBackend.MARLIN, experts.MarlinExperts)
    monkeypatch.setattr(mxfp4, "select_deepseek_v4_mxfp4_moe_backend", lambda moe: chosen)
    monkeypatch.setattr(mxfp4, "make_mxfp4_moe_kernel", lambda **given: SimpleNamespace(
        fused_experts=SimpleNamespace(process_weights_after_loading=lambda layer: None), given=given))
    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)

    def load(count, hidden, intermediate, cls=experts.AmpereMxfp4MoEMethod):
        made = cls(config(hidden, intermediate))
        hidden, width = made.maybe_roundup_sizes(
            hidden_size=hidden, intermediate_size_per_partition=intermediate, act_dtype=torch.bfloat16,
            moe_parallel_config=made.moe.moe_parallel_config,
        )
        layer = torch.nn.Module()
        layer._expert_routing_tables = lambda: None
        layer.swiglu_limit = LIMIT
        made.create_weights(layer, count, hidden, width, torch.bfloat16, weight_loader=None)
        given = PLAIN.cases[0].make({"T": 7, "E": count, "D": hidden, "I": intermediate, "K": 3},
                                    torch.Generator().manual_seed(count), "cpu")
        for name, loaded in (("w13_weight", "w13"), ("w13_weight_scale", "w13_scale"), ("w2_weight", "w2"),
                             ("w2_weight_scale", "w2_scale")):
            place = getattr(layer, name).data
            if loaded.startswith("w13"):
                for half, rows in zip(place.chunk(2, 1), given[loaded].chunk(2, 1)):
                    half[:, : rows.shape[1]] = rows
            else:
                place[..., : given[loaded].shape[2]] = given[loaded]
        made.process_weights_after_loading(layer)
        return made, layer, given

    return load


def unpaired(rows):
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


@pytest.mark.parametrize("capability, ours", [((8, 0), True), ((8, 6), True), ((9, 0), False), ((10, 0), False)])
def test_who_takes_our_method(on_card, capability, ours):  # noqa: F811
    on_card(*capability)
    assert gate.expert_method(config(5120, 288)) is (experts.AmpereMxfp4MoEMethod if ours else None)


@pytest.mark.parametrize("change, reason", [
    ({"has_bias": True}, "biases"), ({"is_lora_enabled": True}, "LoRA"),
    ({"activation": MoEActivation.SWIGLUOAI}, "the activation swigluoai"),
    ({"hidden_dim": 5184}, "a hidden size of 5184 and 96 of the intermediate one"),
    ({"intermediate_size": 144}, "128 and 144 of the"), ({"intermediate_size": 32}, "128 and 32 of the"),
])
def test_experts_that_ask_for_more_keep_upstreams_method(on_card, change, reason):  # noqa: F811
    on_card(8, 0)
    assert reason in experts.declines(config(**change)) and not experts.declines(config())
    assert gate.expert_method(config(**change)) is None


def test_the_cpu_keeps_its_own_experts():
    assert gate.expert_method(config()) is None


@pytest.mark.parametrize("capability, name", [((8, 0), "AmpereMxfp4MoEMethod"), ((9, 0), "Mxfp4MoEMethod")])
def test_patched_config_returns_the_method(on_card, monkeypatch, capability, name):  # noqa: F811
    """The function that patch 0500 edits, called as a layer calls it."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

    on_card(*capability)
    chosen = (Mxfp4MoeBackend.MARLIN, experts.MarlinExperts)
    monkeypatch.setattr(mxfp4, "select_deepseek_v4_mxfp4_moe_backend", lambda moe: chosen)
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = config()
    quantization = DeepseekV4FP8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[32, 32])
    quantization._resolved_expert_dtype, quantization._resolved_moe_quant_algo = "fp4", ""
    assert type(quantization.get_quant_method(layer, "model.layers.0.ffn.experts")).__name__ == name


def test_another_backend_is_upstreams_to_the_last_bit(method, monkeypatch):
    other = (Mxfp4MoeBackend.EMULATION, experts.MarlinExperts)
    monkeypatch.setattr(mxfp4, "select_deepseek_v4_mxfp4_moe_backend", lambda moe: other)
    layers = [method(2, 128, 96, cls)[1] for cls in (experts.AmpereMxfp4MoEMethod, mxfp4.Mxfp4MoEMethod)]
    for (name, ours), (_, theirs) in zip(*(layer.named_parameters() for layer in layers)):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("intermediate, held", [(64, 64), (96, 128), (160, 192), (288, 320)])
def test_weights_are_what_was_loaded_and_the_padding_is_zero(method, intermediate, held):
    """Unpacked by our description of the layout, from what upstream's code packed."""
    _, layer, given = method(3, 128, intermediate)
    assert layer.w13_weight.shape == (3, 8, 4 * intermediate) and layer.w2_weight.shape == (3, held // 16, 256)
    scale13, scale2 = (s.view(torch.uint8) for s in (layer.w13_weight_scale, layer.w2_weight_scale))
    assert scale13.shape == (3, 4, 2 * intermediate) and scale2.shape == (3, held // 32, 128)
    assert torch.equal(unpaired(unpack(layer.w13_weight)), given["w13"])
    assert torch.equal(unpaired(unpack_scales(scale13)), given["w13_scale"])
    down, down_scale = unpack(layer.w2_weight), unpack_scales(scale2)
    assert torch.equal(down[..., : intermediate // 2], given["w2"])
    assert torch.equal(down_scale[..., : intermediate // 32], given["w2_scale"])
    padding = mxfp4_decode_ref(down.flatten(0, 1), down_scale.flatten(0, 1))[:, intermediate:]
    assert padding.shape[1] == held - intermediate and not padding.any()


def test_bytes_of_a_rank():
    """TP8, TP4, TP2 and whole experts: what upstream's rule of 128 and ours store of one expert."""
    def stored(gate_up, down):
        return (2 * gate_up + down) * 5120 * 17 // 32

    for intermediate, upstream in ((288, 384), (576, 640), (1152, 1152), (2304, 2304)):
        assert mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size(
            Mxfp4MoeBackend.MARLIN, 5120, intermediate) == (5120, upstream)
    assert [down_inputs(i) for i in (288, 576, 1152, 2304)] == [320, 576, 1152, 2304]
    assert stored(384, 384) - stored(288, 320) == 696_320


@pytest.fixture
def on_stand_ins(monkeypatch):
    """`AmpereMarlinExperts.apply` with stand-ins for the operators that need a card."""
    monkeypatch.setattr(experts, "get_marlin_workspace", lambda device: None)
    calls, ordered = [], []

    def align(topk_ids, block_rows, everywhere, expert_map, ignore_invalid_experts):
        calls.append(block_rows)
        return topk_ids, expert_map, None

    def multiply(a, c, weight, bias, scale, a_scales, global_scale, zeros, locks, ids, expert_map, _, topk_weights, *,
                 top_k, mul_topk_weights, size_m, size_n, size_k, **rest):
        assert a.shape == (size_m, size_k) and c.shape == (size_m * top_k, size_n) and a.is_contiguous()
        assert (weight.shape[1] * 16, weight.shape[2] // 2) == (size_k, size_n)
        local = ids if expert_map is None else expert_map[ids.long()]
        codes, factors = unpack(weight), unpack_scales(scale.view(torch.uint8))
        rows = a.repeat_interleave(top_k, 0)
        c.fill_(torch.nan)
        for row, expert in enumerate(local.flatten().tolist()):
            if expert >= 0:
                product = mxfp4_decode_ref(codes[expert], factors[expert]) @ rows[row].float()
                c[row] = (product * topk_weights.flatten()[row] if mul_topk_weights else product).to(c.dtype)
        return c

    def add(rows, output, ids, expert_map):
        here = True if expert_map is None else expert_map[ids.long()][..., None] >= 0
        output.copy_(torch.where(torch.as_tensor(here), rows, 0).float().sum(1))

    monkeypatch.setattr(experts, "moe_align_block_size", align)
    monkeypatch.setattr(experts, "order_by_token", lambda *routing: ordered.append(routing))
    monkeypatch.setattr(ops, "moe_wna16_marlin_gemm", multiply)
    monkeypatch.setattr(ops, "moe_sum", add)
    yield calls
    # Nothing is multiplied in an order that atomics left.
    assert len(ordered) == len(calls) and all(block == routing[4] for block, routing in zip(calls, ordered))


def applied(layer, given, expert_map=None, hook=None):
    ours = experts.AmpereMarlinExperts.__new__(experts.AmpereMarlinExperts)
    ours.moe_config, ours.post_gemm2_hook = config(intermediate=layer.w13_weight.shape[2] // 4), hook
    ours.quant_config = SimpleNamespace(w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale)
    ours.activation_config = ApplyMoEActivationConfig(clamp_limit=LIMIT)
    layer.expert_map = expert_map
    ours.process_weights_after_loading(layer)
    tokens, hidden = given["x"].shape
    everywhere = -1 if expert_map is None else len(expert_map)
    count, _, width, _, k = ours.moe_problem_size(given["x"], layer.w13_weight, layer.w2_weight, given["topk_ids"])
    shapes = ours.workspace_shapes(tokens, width, hidden, k, everywhere, count, None, MoEActivation.SILU)
    first, second, out = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in shapes)
    ours.apply(out, given["x"], layer.w13_weight, layer.w2_weight, given["topk_weights"], given["topk_ids"],
               MoEActivation.SILU, everywhere, expert_map, None, None, first, second, None, False)
    return out


@pytest.mark.parametrize("tokens, asked, marlin", [
    (1, "", False), (2, "", True), (7, "", True), (7, f"{DECODE}=reference", False), (1, f"{DECODE}=upstream", True),
])
@pytest.mark.parametrize("intermediate", [64, 96])
@pytest.mark.parametrize("mapped", [False, True])
def test_layer_equals_the_plain_experts(method, on_stand_ins, monkeypatch, intermediate, mapped, tokens, asked, marlin):
    """On workspaces of NaN: Marlin is never fed or asked for a row or column that nobody wrote."""
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", asked)
    _, layer, given = method(4, 128, intermediate)
    given |= {name: given[name][:tokens] for name in ("x", "topk_weights")}
    given["topk_ids"] = torch.rand(tokens, 8 if mapped else 4).argsort(-1)[:, :3].int().contiguous()
    owner = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1], dtype=torch.int32) if mapped else None
    local = owner[given["topk_ids"].long()] if mapped else given["topk_ids"]
    want = mxfp4_experts_ref(**given | {"topk_ids": local})
    assert_close(applied(layer, given, owner), want, MARLIN)
    assert on_stand_ins == ([8] if marlin else [])


@pytest.mark.parametrize("asked, width, mapped, most", [
    ("", 288, False, 1), ("", 576, False, 1), ("", 1152, False, 0), ("", 2304, True, 1), ("mhc_post_pre=triton", 288, False, 1),
    (f"{DECODE}=upstream", 288, False, 0), (f"{DECODE}=upstream", 2304, True, 0), (f"{DECODE}=triton", 1152, False, 16),
])
def test_who_serves_a_batch(monkeypatch, asked, width, mapped, most):
    """And what a layer prepares for it when it is loaded: the counters, and one compilation of what it will launch."""
    served, compiled = [], []
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", asked)
    monkeypatch.setattr(experts, "mxfp4_experts_decode", lambda x, *rest: served.append((len(x), "ours")))
    monkeypatch.setattr(experts, "marlin_experts", lambda x, *rest: served.append((len(x), "Marlin")))
    monkeypatch.setattr(experts.warmup, "compile_experts", lambda *shape: compiled.append(shape))
    ours = experts.AmpereMarlinExperts.__new__(experts.AmpereMarlinExperts)
    ours.moe_config, ours.post_gemm2_hook = config(5120, width), None
    scale = torch.empty(0, dtype=torch.uint8)
    ours.quant_config = SimpleNamespace(w1_scale=scale, w2_scale=scale)
    ours.activation_config = ApplyMoEActivationConfig(clamp_limit=LIMIT)
    expert_map = torch.zeros(8, dtype=torch.int32) if mapped else None
    ours.process_weights_after_loading(SimpleNamespace(w2_weight=scale, expert_map=expert_map))
    assert compiled == ([(5120, width, 3, mapped, most)] if most else [])
    assert (ours._arrived is None) == (not most)
    assert not most or torch.equal(ours._arrived, torch.zeros(1024, dtype=torch.int32))

    def apply(tokens, weigh_input=False):
        ours.apply(scale, torch.empty(tokens, 0), scale, scale, scale, scale, MoEActivation.SILU, 8, expert_map, None, None,
                   scale, scale, None, weigh_input)

    for tokens in range(1, 19):
        apply(tokens)
    assert served == [(tokens, "ours" if tokens <= most else "Marlin") for tokens in range(1, 19)]
    apply(1, weigh_input=True)
    assert served[-1] == (1, "Marlin")


def test_a_consumer_of_unweighted_rows_is_refused(method, on_stand_ins):
    _, layer, given = method(4, 128, 64)
    with pytest.raises(NotImplementedError, match="unweighted expert rows"):
        applied(layer, given, hook=lambda *rows: None)


def test_block_rows_are_upstreams():
    """Its loop, for the batches that a rank meets."""
    batches = ((1, 6, 384), (60, 6, 384), (500, 6, 384), (2000, 6, 384), (8192, 6, 384), (97, 3, 128))
    for tokens, chosen, count in batches:
        for rows in (8, 16, 32, 48, 64):
            if tokens * chosen / count / rows < 0.9:
                break
        assert experts._block_rows(tokens * chosen / count) == rows
