# SPDX-License-Identifier: Apache-2.0
"""Who takes our path: Ampere and the CPU platform. Every hook of the series leaves newer GPUs as they were."""

import logging
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere import arch
from vllm.ampere.errors import UnsupportedDeviceError
from vllm.ampere.integration import gate


@pytest.fixture
def on_card(monkeypatch):
    """Make the process believe in an NVIDIA card of a given capability."""

    def believe(major: int, minor: int):
        capability = SimpleNamespace(major=major, minor=minor)
        card = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, get_device_capability=lambda: capability)
        monkeypatch.setattr(gate, "current_platform", card)
        gate.architecture.cache_clear()

    yield believe
    gate.architecture.cache_clear()


CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=1))


@pytest.mark.parametrize("capability, expected", [((8, 0), arch.SM80), ((8, 6), arch.SM86)])
def test_ampere_takes_our_path(on_card, capability, expected):
    from vllm.ampere.integration.attention import AmpereDeepseekV4Attention

    on_card(*capability)
    assert gate.architecture() is expected
    assert gate.attention_class(CONFIG) is AmpereDeepseekV4Attention


def test_ada_takes_the_sm86_path_with_a_warning(on_card, caplog):
    on_card(8, 9)
    with caplog.at_level(logging.WARNING):
        assert gate.architecture() is arch.SM86
    assert "8.9 is not tuned for" in caplog.text


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 7), (6, 1)])
def test_others_are_refused_in_a_sentence(on_card, capability):
    on_card(*capability)
    with pytest.raises(UnsupportedDeviceError, match=f"capability {capability[0]}.{capability[1]} cannot run") as error:
        gate.architecture()
    assert "A100" in error.value.hint


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0)])
def test_newer_cards_keep_upstreams_path(on_card, capability):
    from vllm.ampere.integration.engram import look_up

    on_card(*capability)
    assert gate.architecture() is None
    assert gate.attention_class(CONFIG) is None
    assert look_up(embedding=None, indices=None, out=None) is False


@pytest.mark.parametrize("capability, upstream", [((9, 0), "DeepseekV4FlashMLAAttention"), ((12, 0), "DeepseekV4FlashInferSM120Attention")])
def test_patched_selection_returns_upstreams_class(on_card, monkeypatch, capability, upstream):
    """The function that patch 0010 edits, called as the layer calls it."""
    from vllm.models.deepseek_v41.nvidia import model

    on_card(*capability)
    monkeypatch.setattr(model, "current_platform", gate.current_platform)
    monkeypatch.setattr(model.DeepseekV4MegaAttnAttention, "is_available_for", classmethod(lambda cls, config: False))
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=None), parallel_config=CONFIG.parallel_config)
    assert model._select_dsv4_attn_cls(config).__name__ == upstream


def test_patched_selection_returns_ours_on_ampere(on_card):
    from vllm.models.deepseek_v41.nvidia import model

    on_card(8, 0)
    assert model._select_dsv4_attn_cls(CONFIG).__name__ == "AmpereDeepseekV4Attention"


def test_compressor_hook_defaults_to_upstreams_class():
    from vllm.ampere.integration.attention import AmpereDeepseekV4Attention
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention
    from vllm.models.deepseek_v41.compressor import DeepseekCompressor
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

    assert DeepseekV4Attention.compressor_cls is DeepseekCompressor
    assert DeepseekV4FlashMLAAttention.compressor_cls is DeepseekCompressor
    assert AmpereDeepseekV4Attention.compressor_cls is not DeepseekCompressor


def test_prefill_context_parallelism_is_refused_on_ampere(on_card):
    on_card(8, 0)
    config = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=2))
    with pytest.raises(NotImplementedError, match="leave it at 1"):
        gate.attention_class(config)
