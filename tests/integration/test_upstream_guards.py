# SPDX-License-Identifier: Apache-2.0
"""What upstream itself asks, refuses and sizes where an Ampere card takes our path; public failures began with each."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere.integration.attention import AmpereDeepseekV4Attention as Attention  # noqa: E402
from vllm.ampere.testing import tiny_checkpoint  # noqa: E402
from vllm.ampere.testing.engine import OPTIONS, run  # noqa: E402


@pytest.fixture
def card(monkeypatch):
    """Upstream's CUDA platform with a card of a given capability; a wheel for the CPU lacks the library that it imports."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    def of(capability):
        return type("Card", (CudaPlatformBase,), {
            "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(*capability))})()

    return of


@pytest.mark.parametrize("capability, probed", [((8, 0), False), ((8, 6), False), ((9, 0), True)])
def test_deep_gemm_is_looked_for_where_it_could_run(card, monkeypatch, capability, probed):
    from vllm.utils import deep_gemm

    asked = []
    monkeypatch.setattr(deep_gemm, "current_platform", card(capability))
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: asked.append("the module") or False)
    assert deep_gemm.is_deep_gemm_supported.__wrapped__() is False
    assert bool(asked) is probed


@pytest.mark.parametrize("capability, refused", [((8, 0), True), ((8, 6), True), ((9, 0), False)])
def test_adaptive_verification_is_refused(card, monkeypatch, capability, refused):
    """It moves the boundaries of requests on the device; the index cache's metadata would come from the host's."""
    from vllm.v1.attention.backends.mla import indexer
    from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend as unsupported
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import maybe_create_adaptive_verification_manager

    monkeypatch.setattr(indexer, "current_platform", card(capability))
    monkeypatch.setattr(indexer, "has_deep_gemm", lambda: True)  # a wheel for cards has it
    backend = indexer.DeepseekV41IndexerBackend
    groups = [[SimpleNamespace(backend=each, layer_names=["0"]) for each in (Attention.backend_cls, Attention.swa_backend_cls, backend)]]
    assert unsupported(groups) == (backend.__name__ if refused else None)
    if refused:
        with pytest.raises(ValueError, match="enable_adaptive_verification=false in the speculative config"):
            maybe_create_adaptive_verification_manager(
                enable_adaptive_verification=True, attn_groups=groups, req_states=None, query_start_loc=None, num_bonus_tokens=1,
                max_total_logits=1, vllm_config=None)


@pytest.mark.parametrize("asked", ["auto", "fp8", "fp8_ds_mla"])
def test_cache_types_that_mean_our_records(asked):
    from vllm.models.deepseek_v41.attention import _resolve_dsv4_kv_cache_dtype as resolve

    config = SimpleNamespace(cache_dtype=asked)
    preferred = Attention.packed_kv_cache_dtype.fget(None)
    assert resolve(Attention.use_fp8_ds_mla_layout, asked, config, preferred) == ("fp8_ds_mla", torch.uint8)
    assert config.cache_dtype == "fp8_ds_mla"


@pytest.mark.parametrize("asked", ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "fp8_inc"])
def test_other_cache_types_are_refused_in_a_sentence(asked):
    from vllm.models.deepseek_v41.attention import _resolve_dsv4_kv_cache_dtype as resolve

    with pytest.raises(ValueError, match=f"only support fp8 kv-cache, got {asked}. Please set `--kv-cache-dtype fp8`"):
        resolve(Attention.use_fp8_ds_mla_layout, asked, None)


def test_nvfp4_records_are_refused(tmp_path):
    """Upstream takes the word for every backend of packed records; the layer knows that the card reads no such one."""
    options = OPTIONS | {"kv_cache_dtype": "nvfp4_ds_mla", "skip_tokenizer_init": True}
    model = tiny_checkpoint.write(tmp_path / "sharp", "sharp")
    ended = run(["-c", f"from vllm import LLM; LLM({str(model)!r}, **{options})"], tmp_path / "log", 200)
    assert ended.code not in (0, None)
    assert "ValueError: nvfp4_ds_mla needs the V4.1 KV records" in ended.output, ended.output[-3000:]


@pytest.mark.parametrize("asked, captured", [
    ({"cudagraph_capture_sizes": [1, 6, 48, 64, 65, 512]}, [1, 6, 48, 64]), ({}, None)])
def test_no_capture_is_larger_than_a_step(asked, captured):
    """Buffers have a row for each token of `max_num_batched_tokens`; a capture pads a batch to its size."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    config = SimpleNamespace(
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **asked),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=32), uniform_decode_query_len=6,
        model_config=SimpleNamespace(enforce_eager=False), performance_mode="balanced", speculative_config=None)
    VllmConfig._set_cudagraph_sizes(config)
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert sizes[-1] == config.compilation_config.max_cudagraph_capture_size == 64
    assert captured in (None, sizes)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The configuration of an engine that takes images."""
    from vllm.engine.arg_utils import EngineArgs

    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("seeing") / "vision", "vision")
    return EngineArgs(model=str(folder), **OPTIONS | {"limit_mm_per_prompt": {"image": 1}}).create_engine_config()


@pytest.mark.parametrize("rule, width", [("V4.1", 128), ("V4", 128 + 64)])
def test_window_lists_have_no_place_for_images(seeing, monkeypatch, rule, width):
    """V4's rule, under which an image sees itself whole, is the control: by it prefill lists were wider."""
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    if rule == "V4":
        monkeypatch.setattr(sparse_swa, "DeepseekV4Config", type(seeing.model_config.hf_config))
    assert (seeing.model_config.hf_config.sliding_window, seeing.model_config.hf_config.vision_max_n_token) == (128, 64)
    cache = SlidingWindowMLASpec(block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128)
    builder = Attention.swa_backend_cls.get_builder_cls()(cache, ["0"], seeing, torch.device("cpu"))
    assert builder.prefill_swa_indices.shape == (512, 1, width)
    assert builder.decode_swa_indices.shape == (512, 1, 128)
    assert builder.max_image_tokens == width - 128  # without it upstream builds no list of what an image sees


@pytest.mark.parametrize("capability, rows", [((8, 0), 128), ((8, 6), 128), ((9, 0), 64)])
def test_pages_of_records_and_of_index_keys_are_as_long(card, monkeypatch, capability, rows):
    from vllm.models.deepseek_v41 import sparse_mla
    from vllm.v1.attention.backends.mla import indexer

    for module in (sparse_mla, indexer):
        monkeypatch.setattr(module, "current_platform", card(capability))
    for backend in (Attention.backend_cls, indexer.DeepseekV41IndexerBackend):
        assert backend.get_supported_kernel_block_sizes() == [rows]
