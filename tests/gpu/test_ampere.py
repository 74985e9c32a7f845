# SPDX-License-Identifier: Apache-2.0
"""Upstream's compiled operators that DeepSeek-V4.1 runs on Ampere, each against plain arithmetic.

On a newer card they run the build of that card, so what these tests hold there is that the tests are right;
docs/en/first-ampere-run.md is about running them on an A100, A6000 or RTX 3090.
"""

import importlib.util

import pytest
import torch

from vllm.ampere.kernels.engram.engram_lookup import engram_lookup
from vllm.ampere.kernels.engram.reference import engram_lookup_ref
from vllm.ampere.kernels.kv_cache.reference import window_insert_ref
from vllm.ampere.kernels.kv_cache.window_insert import insert_inputs
from vllm.ampere.kernels.quantization.reference import e4m3_decode_ref, mxfp4_decode_ref, ue8m0_decode_ref
from vllm.ampere.kernels.registry import Tolerance
from vllm.ampere.testing.compare import assert_close

INSTALLED = importlib.util.find_spec("vllm.platforms") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed in this Python")]
# The result is rounded to bfloat16 once, from a float32 sum.
PRODUCT = Tolerance(4e-3, 5e-2)


@pytest.fixture(scope="module", autouse=True)
def operators():
    import vllm._custom_ops  # loads the compiled operators

    if not hasattr(torch.ops._C, "persistent_topk"):
        pytest.skip("this vLLM has no compiled CUDA operators")


@pytest.fixture
def generator():
    return torch.Generator("cpu").manual_seed(11)


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bits of bfloat16 numbers as integers in the numbers' order: neighbours are 1 apart."""
    bits = bits.to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("page_rows", [32, 64])
def test_compiled_insert_writes_our_bytes(generator, page_rows):
    """Its E4M3 conversion is software below compute capability 8.9. Rotated numbers may be a rounding apart."""
    tokens = 4096
    sizes = {"T": tokens, "S": tokens, "B": 2 + tokens // page_rows, "P": page_rows}
    given = insert_inputs(sizes, generator, "cpu")
    given["kv"] *= 2.0 ** torch.randint(-24, 12, (tokens, 1), generator=generator)
    want = {name: tensor.clone() for name, tensor in given.items()}
    window_insert_ref(**want)
    on_card = {name: tensor.cuda() for name, tensor in given.items()}
    cache = torch.empty_strided(given["cache"].shape, given["cache"].stride(), dtype=torch.uint8, device="cuda")
    cache.copy_(given["cache"])
    torch.ops._C.fused_deepseek_v4_kv_rope_insert(
        on_card["kv"], cache, on_card["slots"], on_card["positions"], on_card["cos_sin"], page_rows, None, False
    )
    got, wanted = (c.cpu().contiguous().flatten(1) for c in (cache, want["cache"]))
    ends = page_rows * 576
    assert torch.equal(got[:, ends:], wanted[:, ends:]), "scale bytes"
    got, wanted = (c[:, :ends].unflatten(1, (page_rows, 576)) for c in (got, wanted))
    different = got[..., :448] != wanted[..., :448]
    assert not different.any(), f"{int(different.sum())} codes of {tokens * 448}"
    steps = [ordered(c[..., 448:].contiguous().view(torch.int16)) for c in (got, wanted)]
    assert (steps[0] - steps[1]).abs().max() <= 1


@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("width", [3000, 40_000, 260_000])
def test_persistent_topk(generator, rows, width, k):
    """Rows of different lengths: the scores chosen are the largest, and rows shorter than k are filled with -1."""
    from vllm.model_executor.layers.indexer_topk import RADIX_TOPK_WORKSPACE_SIZE

    logits = torch.randn(rows, width, generator=generator).cuda()
    lens = torch.randint(k, width + 1, (rows,), generator=generator).int()
    lens[0] = k - 7
    chosen = torch.full((rows, k), -2, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(RADIX_TOPK_WORKSPACE_SIZE, dtype=torch.uint8, device="cuda")
    torch.ops._C.persistent_topk(logits, lens.cuda().unsqueeze(1), chosen, workspace, k, width)
    for row, length in enumerate(lens.tolist()):
        found = chosen[row][chosen[row] >= 0].long()
        assert len(found) == len(found.unique()) == min(k, length) and found.max() < length
        assert (chosen[row] < 0).sum() == k - len(found) and (chosen[row] >= -1).all()
        best = logits[row, :length].topk(len(found)).values
        assert torch.equal(logits[row, found].sort(descending=True).values, best)


def marlin_layer(rows: int, columns: int, weight: torch.Tensor, scales: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = rows, columns, torch.bfloat16
    layer.weight = torch.nn.Parameter(weight.cuda(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales.cuda(), requires_grad=False)
    return layer


def mxfp8(generator, rows, columns):
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as marlin

    codes = torch.randint(0, 256, (rows, columns), generator=generator)
    codes = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    scales = torch.randint(110, 120, (rows, columns // 32), generator=generator).to(torch.uint8)
    layer = marlin_layer(rows, columns, codes.view(torch.float8_e4m3fn), scales)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        marlin.prepare_mxfp8_layer_for_marlin(layer)
    finally:
        torch.set_default_dtype(default)
    weight = e4m3_decode_ref(codes) * ue8m0_decode_ref(scales).repeat_interleave(32, 1)
    return weight, lambda x: marlin.apply_mxfp8_marlin_linear(x, layer.weight, layer.weight_scale, None, rows, columns)


def mxfp4(generator, rows, columns):
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 120, (rows, columns // 32), generator=generator).to(torch.uint8)
    layer = marlin_layer(rows, columns, packed, scales)
    marlin.prepare_fp4_layer_for_marlin(layer)
    return mxfp4_decode_ref(packed, scales), lambda x: marlin.apply_fp4_marlin_linear(
        x, layer.weight, layer.weight_scale, None, None, rows, columns
    )


# The first is small and deep enough for the sum by atomics, which bfloat16 must not take below capability 9.0.
@pytest.mark.parametrize("rows, columns", [(256, 4096), (1536, 1280), (5120, 2304)])
@pytest.mark.parametrize("make", [mxfp8, mxfp4])
def test_marlin_linear(generator, make, rows, columns):
    """Against the product with the decoded weight, in float64; the same bits in ten runs."""
    weight, apply = make(generator, rows, columns)
    weight = weight.cuda().double()
    for tokens in (1, 16, 300):
        x = torch.randn(tokens, columns, generator=generator).bfloat16().cuda()
        got = apply(x)
        assert_close(got, x.double() @ weight.T, PRODUCT, f"{make.__name__}, {tokens} tokens")
        assert all(torch.equal(apply(x), got) for _ in range(9))


def test_marlin_sums_without_atomics(monkeypatch):
    """Even where the user asks for them: bfloat16 atomics are not native below capability 9.0."""
    if torch.cuda.get_device_capability() >= (9, 0):
        pytest.skip("capability 9.0 and newer have bfloat16 atomics")
    from vllm.model_executor.layers.quantization.utils.marlin_utils import should_use_atomic_add_reduce

    monkeypatch.setenv("VLLM_MARLIN_USE_ATOMIC_ADD", "1")
    assert not should_use_atomic_add_reduce(m=1, n=256, k=4096, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert should_use_atomic_add_reduce(m=1, n=256, k=4096, device=torch.device("cuda"), dtype=torch.float16)


def test_engram_lookup_reads_pinned_host_memory(generator):
    """256 MiB of codes, more than any cache of the card: exact, over the bus, twice."""
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    rows = 1 << 20
    table = torch.empty(rows, 256, dtype=torch.uint8, pin_memory=True).random_(0, 127, generator=generator)
    scales = torch.empty(rows, 8, dtype=torch.uint8, pin_memory=True).random_(110, 135, generator=generator)
    chosen = torch.randint(-5, rows + 5, (700, 24), generator=generator)
    want = engram_lookup_ref(table, scales, chosen, 0, rows)
    views = [get_accelerator_view_from_cpu_tensor(t) for t in (table, scales)]
    for _ in range(2):
        assert torch.equal(engram_lookup(*views, chosen.cuda(), 0, rows).cpu(), want)
