# SPDX-License-Identifier: Apache-2.0
"""Two kernels on the live inputs of a run: prefill, decode, mixed batches, DSpark."""

import pytest

from vllm.ampere.kernels.registry import all_ops

pytestmark = pytest.mark.gpu
upstream = pytest.mark.reads("shadow", "shadow-dspark")
# Both sides round to bfloat16 once: a step is 2^-8 of a value, and the norm over many values is smaller.
ATTENTION = ("decode, window", "decode, window and selection", "prefill, window", "prefill, window and selection")
# Values of a live layer reach further past their rms than the drawn ones of an op's cases.
ATTENTION_WORST = 0.15
BYTES = ("compressed record bytes", "index key bytes", "index query bytes", "window record bytes")


@pytest.fixture(params=["shadow", "shadow-dspark"])
def found(request, runs):
    seen = runs.result(request.param)["shadow"]
    runs.figures.update({f"{request.param}, {kind}": {k: float(f"{v:.3g}") for k, v in values.items() if v} for kind, values in seen.items()})
    return seen


@upstream
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention(found, kind):
    """At most a bfloat16 step of a value, and 0.3 % in norm."""
    assert found[kind]["calls"] > 0
    assert found[kind]["relative_norm"] < 3e-3
    assert found[kind]["worst"] < ATTENTION_WORST


@upstream
@pytest.mark.parametrize("kind", BYTES)
def test_bytes(found, kind):
    """Two codes are neighbours where the value lies at a tie, and a rotated value near zero may be a few steps off; at most
    one byte in a hundred thousand."""
    assert found[kind]["calls"] > 0 and found[kind]["bytes"] > 10_000
    assert found[kind]["bytes_off"] <= 1e-5 * found[kind]["bytes"]
    assert found[kind]["byte_step"] <= 4


@upstream
@pytest.mark.parametrize("kind", ["gather of records", "engram rows"])
def test_equal_bits(found, kind):
    assert found[kind]["calls"] > 0
    assert found[kind]["worst"] == 0


@upstream
def test_scores_and_weights(found):
    assert found["index scores, prefill"]["relative_norm"] < 3e-4
    assert found["index query weights"]["relative_norm"] < 1e-6
    assert found["inverse rotation"]["relative_norm"] < 5e-4  # a bfloat16 step of one value in 200, in the worst call


@upstream
@pytest.mark.parametrize("kind, size", [("selected rows", 512), ("candidate blocks", 128)])
def test_selection(found, kind, size):
    """The sets differ by near ties alone: in the worst call by two of their members."""
    assert found[kind]["calls"] > 0
    assert found[kind]["relative_norm"] <= (2 * 2 / size) ** 0.5


@pytest.mark.reads("references", "references-dspark")
@pytest.mark.parametrize("run", ["references", "references-dspark"])
def test_every_kernel_against_its_reference(runs, run):
    """Each op that the engine calls, within its tolerance, in every call of a served mix."""
    seen, tolerances = runs.result(run)["shadow"], {}
    for op in all_ops().values():
        tolerances |= {f"{op.name}: {output}": tolerance for output, tolerance in op.tolerances.items()}
    runs.figures.update({f"{run}, {kind}": {k: float(f"{v:.3g}") for k, v in values.items() if v} for kind, values in seen.items()})
    called = {kind.split(":")[0] for kind in seen}
    assert called >= {
        "sparse_mla_decode", "sparse_mla_rows", "gather_dequant", "combine_topk_swa", "topk_slots", "inverse_rope", "compressor_insert",
        "engram_lookup", "key_norm_rope_store", "query_rope_quant", "paged_mqa_logits", "candidate_mqa_logits", "select_topk",
        "candidate_blocks",
    }
    for kind, values in seen.items():
        bound = tolerances[kind]
        worst = max(bound.worst, ATTENTION_WORST) if kind.startswith("sparse_mla") else bound.worst
        assert values["relative_norm"] <= bound.relative_norm and values["worst"] <= worst, (kind, values, bound)
        assert values["bytes_off"] <= 1e-5 * values["bytes"], (kind, values)
