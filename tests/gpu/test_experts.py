# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels on the card: what is checked of compiled kernels on the CPU too, Marlin on the same memory, and graphs."""

import pytest
import torch

from tests.compiled.test_experts import *  # noqa: F403
from tests.compiled.test_experts import OP, moved, produce, sized
from vllm.ampere.kernels.moe.mxfp4_experts import OP as PLAIN
from vllm.ampere.kernels.moe.mxfp4_experts_decode import ARRIVAL_COUNTERS, mxfp4_experts_decode
from vllm.ampere.kernels.registry import Tolerance
from vllm.ampere.testing.compare import assert_close

pytestmark = pytest.mark.gpu
# Marlin stores gate and up, and each expert's row, in bfloat16.
MARLIN = Tolerance(1e-2, 1e-1)


@pytest.mark.parametrize("tokens", [1, 6])
def test_graph_replay_follows_the_routing(tokens):
    """One graph, replayed for other tokens that chose other experts."""
    given = moved(sized(31, T=tokens, E=16, D=1024, I=288, K=6), "cuda")
    decode = OP.implementations[0].function
    decode(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(**given)
    for seed in (32, 33):
        other = moved(sized(seed, T=tokens, E=16, D=1024, I=288, K=6), "cuda")
        for name in ("x", "topk_ids", "topk_weights"):
            given[name].copy_(other[name])
        given["out"].fill_(torch.nan)
        graph.replay()
        want = produce(OP, decode, given | {"out": torch.empty_like(given["out"])})["out"]
        assert torch.equal(given["out"], want) and want.any() and not given["arrived"].any()


@pytest.fixture(scope="module")
def experts():
    """`integration.marlin_experts`, where vLLM's own CUDA operators are."""
    pytest.importorskip("vllm.platforms", reason="needs vLLM")
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("the installed vLLM has no CUDA kernels")
    from vllm.ampere.integration import marlin_experts

    return marlin_experts


def loaded(experts, given):
    """The weights as `AmpereMxfp4MoEMethod` keeps them: paired, repacked by upstream's operator, padded."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

    paired = [experts.pair_gate_up(given[name]).contiguous() for name in ("w13", "w13_scale")]
    layer = torch.nn.Module()
    layer.params_dtype = torch.bfloat16
    packed = prepare_moe_mxfp4_layer_for_marlin(
        layer, paired[0], given["w2"], paired[1], given["w2_scale"], None, None
    )
    for name, tensor in zip(("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"), packed):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    experts.pad_down(layer)
    return layer


@pytest.mark.parametrize("tokens", [1, 6, 16, 100, 700])
@pytest.mark.parametrize("intermediate, ranks", [(288, 1), (576, 1), (96, 1), (256, 2)])
def test_marlin_and_the_decode_kernel_share_one_memory(experts, intermediate, ranks, tokens):
    """Both against the reference on the checkpoint's own layout; 700 tokens fill Marlin's largest blocks."""
    sizes = {"T": tokens, "E": 12, "D": 1024, "I": intermediate, "K": 4}
    given = PLAIN.cases[0].make(sizes, torch.Generator().manual_seed(tokens), "cpu")
    everywhere = 12 * ranks
    ids = torch.rand(tokens, everywhere, generator=torch.Generator().manual_seed(intermediate)).argsort(-1)[:, :4]
    owner = torch.where(torch.arange(everywhere) % ranks == 0, torch.arange(everywhere) // ranks, -1).int()
    want = PLAIN.reference(**given | {"topk_ids": owner[ids]})
    given = moved(given, "cuda")
    layer, ids = loaded(experts, given), ids.int().contiguous().cuda()
    expert_map = owner.cuda() if ranks > 1 else None
    shared = (given["x"], layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
    out = torch.full_like(given["x"], torch.nan)
    spaces = [torch.full((tokens * 4 * 1152,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    global_experts = everywhere if ranks > 1 else -1
    experts.marlin_experts(*shared, given["topk_weights"], ids, out, *spaces, 10.0, global_experts, expert_map)
    assert_close(out.cpu(), want, MARLIN, "Marlin")
    if tokens <= 16:
        bytes_of = [t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for t in shared]
        arrived = torch.zeros(ARRIVAL_COUNTERS, dtype=torch.int32, device="cuda")
        out.fill_(torch.nan)
        mxfp4_experts_decode(*bytes_of, given["topk_weights"], ids, out, arrived, 10.0, expert_map)
        assert_close(out.cpu(), want, OP.tolerances["out"], "the decode kernel")
