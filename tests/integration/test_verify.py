# SPDX-License-Identifier: Apache-2.0
"""What is checked before a checkpoint is loaded."""

from dataclasses import replace

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere.errors import SelectionError
from vllm.ampere.integration import verify
from vllm.ampere.kernels.registry import Op, all_ops


def test_the_cpu_has_every_op_of_the_engine():
    verify.require_kernels("cpu")


def test_a_card_without_kernels_is_refused_before_anything_is_loaded(monkeypatch):
    """A reference never takes a kernel's place in silence."""
    missing = verify.ENGINE_OPS[0]
    monkeypatch.setitem(all_ops(), missing, replace(all_ops()[missing], implementations=()))
    with pytest.raises(SelectionError, match=f"{missing}: no implementation runs on sm80") as error:
        verify.require_kernels("sm80")
    assert "*=reference" in error.value.hint


def test_references_run_on_a_card_when_asked_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", "*=reference")
    verify.require_kernels("sm80")


@pytest.mark.parametrize("value, message", [
    ("reference", "VLLM_AMPERE_KERNELS has 'reference'"),
    ("sparse_mla=reference", "names sparse_mla, which is no op"),
    ("inverse_rope=cuda", "inverse_rope has no implementation cuda"),
])
def test_requests_that_cannot_be_honoured(monkeypatch, value, message):
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", value)
    with pytest.raises(SelectionError, match=message):
        verify.require_kernels("cpu")


def test_the_engine_calls_no_op_beyond_the_list():
    """Every public op that `integration` imports outside its CPU folder is in one of the two lists."""
    from pathlib import Path

    sources = Path(verify.__file__).parent.glob("*.py")
    imported = {
        name.strip()
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("from ..kernels.") and "registry" not in line
        for name in line.partition(" import ")[2].split(",")
    }
    assert imported & all_ops().keys() == {*verify.ENGINE_OPS, *verify.SWITCHED_OPS}


@pytest.mark.parametrize("value, ours", [
    ("", {"markov_sampler", "mhc_post_pre", "mxfp4_experts_decode"}),
    ("mxfp4_experts_decode=upstream", {"markov_sampler", "mhc_post_pre"}),
    ("markov_sampler=upstream,mhc_post_pre=triton", {"mhc_post_pre", "mxfp4_experts_decode"}),
    ("mxfp4_experts_decode=triton,mhc_post_pre=upstream", {"markov_sampler", "mxfp4_experts_decode"}),
])
def test_what_is_required_is_what_serves(monkeypatch, value, ours):
    """Of the ops that have a rival upstream all but those whose place was given back to it."""
    chosen = []
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", value)
    monkeypatch.setattr(Op, "choose_for", lambda op, architecture: chosen.append((op.name, architecture)))
    verify.require_kernels("sm80")
    assert sorted(chosen) == sorted((name, "sm80") for name in (*verify.ENGINE_OPS, *ours))


@pytest.mark.parametrize("load_format, refused", [("auto", True), ("safetensors", True), ("dummy", False)])
def test_a_dummy_load_needs_no_shards(tmp_path, capsys, load_format, refused):
    """A folder with a config alone is refused unless its weights are to be drawn."""
    from types import SimpleNamespace

    given = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)), load_config=SimpleNamespace(load_format=load_format),
                            parallel_config=SimpleNamespace(pipeline_parallel_size=1))
    (tmp_path / "config.json").write_text("{}")
    if not refused:
        verify.AmpereDeepseekV41Config.verify_and_update_config(given)
        return
    with pytest.raises(SystemExit):
        verify.AmpereDeepseekV41Config.verify_and_update_config(given)
    assert str(tmp_path) in capsys.readouterr().err
