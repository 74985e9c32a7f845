# SPDX-License-Identifier: Apache-2.0
"""The reference decoder against itself in smaller chunks, and its parts against other derivations.

Whether it computes DeepSeek-V4.1 at all is asked in tests/oracle, of a model written by other hands.
"""

import json
import math
import random
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import save_file

from vllm.ampere.errors import CheckpointError
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing import reference_rounding as rounding
from vllm.ampere.testing.compare import difference
from vllm.ampere.testing.reference_controls import CONTROLS
from vllm.ampere.testing.reference_decoder import ReferenceDecoder, compress_frequencies, engram_multipliers, keep_best
from vllm.ampere.testing.reference_dspark import ReferenceDrafter
from vllm.ampere.testing.reference_weights import decode, load_weights, random_weights, tensor_shapes

WINDOW, TOKENS = 16, 61
SPEC = ModelSpec(
    vocab_size=256, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, q_lora_rank=32, o_lora_rank=32,
    o_groups=2, sliding_window=WINDOW, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6), index_n_heads=8, index_topk=8, candidate_source_layer_id=4,
    candidate_topk_blocks=4, candidate_block_size=4, moe_intermediate_size=32, n_routed_experts=12,
    swiglu_limit=0.75, engram_layer_ids=(1, 3), engram_num_embeddings=(28000, 31000), engram_vocab_size=1000,
    engram_compressed_vocab_size=192, dspark_noise_token_id=250, dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=16, dspark_n_routed_experts=8, vision_layers=1,
)
TOKEN_CLASSES = [i % 192 for i in range(SPEC.vocab_size)]
SEQUENCE = torch.randint(0, SPEC.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
IMAGE = torch.zeros(TOKENS, dtype=torch.bool)
IMAGE[20:27] = IMAGE[40:42] = True


@pytest.fixture(scope="module")
def weights():
    return random_weights(SPEC, seed=0)


def make(weights, rounded=rounding.FLOAT32):
    return ReferenceDecoder(SPEC, weights, TOKEN_CLASSES, rounded)


def in_chunks(decoder, sizes, image=IMAGE):
    state, parts = decoder.start(), []
    for size in sizes:
        piece = slice(state.tokens, state.tokens + size)
        parts.append(decoder.step(state, SEQUENCE[piece], image[piece]))
    assert state.tokens == TOKENS
    return torch.cat(parts), state


def random_sizes(seed):
    generator, sizes = random.Random(seed), []
    while sum(sizes) < TOKENS:
        sizes.append(min(generator.choice((1, 1, 2, 3, 5, WINDOW - 1, WINDOW, WINDOW + 1)), TOKENS - sum(sizes)))
    return sizes


def states_differ(a, b):
    """Names of the fields in which two states are more than rounding apart."""
    def tensors(value):
        return value if isinstance(value, dict) else {"": torch.as_tensor(value)}

    return [f.name for f in fields(a) for key, x in tensors(getattr(a, f.name)).items()
            if difference(tensors(getattr(b, f.name))[key], x).relative_norm > 1e-5]


@pytest.mark.parametrize("sizes", [
    [1] * TOKENS,
    [WINDOW] * 3 + [13],
    [WINDOW - 1, 2, WINDOW, 28],
    [3] * 20 + [1],
    *map(random_sizes, range(4)),
], ids=lambda sizes: f"{len(sizes)}chunks")
def test_chunks_equal_the_whole_sequence(weights, sizes):
    """Logits and the state left behind, across window, pair, look-back and image edges."""
    whole, whole_state = in_chunks(make(weights), [TOKENS])
    got, state = in_chunks(make(weights), sizes)
    seen = difference(got, whole)
    assert seen.relative_norm <= 1e-5 and seen.worst <= 1e-4
    assert not states_differ(whole_state, state)


@pytest.mark.parametrize("part", ("windows", "compressed", "index_keys", "unpaired", "history"))
def test_every_part_of_the_state_matters(weights, part):
    """Zeroed between two chunks, each part moves the logits: the chunk test would see it lost."""
    decoder = make(weights)
    whole, _ = in_chunks(decoder, [TOKENS])
    state = decoder.start()
    decoder.step(state, SEQUENCE[:19], IMAGE[:19])
    kept = getattr(state, part)
    setattr(state, part, {k: torch.zeros_like(x) for k, x in kept.items()} if isinstance(kept, dict) else kept * 0)
    got = decoder.step(state, SEQUENCE[19:], IMAGE[19:])
    assert difference(got, whole[19:]).relative_norm > 1e-3


def test_a_copied_state_is_a_point_of_return(weights):
    decoder = make(weights)
    state = decoder.start()
    decoder.step(state, SEQUENCE[:21])
    before, expected = state.copy(), state.copy()
    decoder.step(state, torch.flip(SEQUENCE[:30], (0,)))
    assert not states_differ(before, expected)
    assert torch.equal(decoder.step(before, SEQUENCE[21:30]), decoder.step(expected, SEQUENCE[21:30]))


def test_logits_see_no_later_token(weights):
    decoder = make(weights)
    changed = SEQUENCE.clone()
    changed[40:] = (changed[40:] + 1) % SPEC.vocab_size
    assert difference(decoder.logits(changed)[:40], decoder.logits(SEQUENCE)[:40]).relative_norm <= 1e-5


def test_image_tokens_route_differently_and_have_no_ngrams(weights):
    """A text token right after a span hashes as at the start of a sequence."""
    decoder = make(weights)
    state = decoder.start()
    seen = decoder.ngrams(state, SEQUENCE, IMAGE)
    pad = TOKEN_CLASSES[SPEC.engram_pad_token_id]
    own = [TOKEN_CLASSES[t] for t in SEQUENCE.tolist()]
    assert seen[27].tolist() == [own[27], pad, pad, pad]
    assert seen[28].tolist() == [own[28], own[27], pad, pad]
    assert seen[0].tolist() == [own[0], pad, pad, pad]
    assert seen[39].tolist() == own[36:40][::-1]
    assert (seen[IMAGE] == pad).all()
    text, image = decoder.logits(SEQUENCE), decoder.logits(SEQUENCE, IMAGE)
    assert difference(image[:20], text[:20]).relative_norm <= 1e-5
    assert (difference_per_row(image[20:27], text[20:27]) > 1e-2).all()


# ---------------------------------------------------------------------------- draft


def test_draft_depends_on_the_context_only(weights):
    """The same draft after any chunking; drafting leaves the state as it was."""
    decoder = make(weights)
    _, whole = in_chunks(decoder, [TOKENS])
    _, pieces = in_chunks(decoder, [1] * TOKENS)
    kept = whole.copy()
    a, b = (ReferenceDrafter(decoder).draft(state, 7) for state in (whole, pieces))
    assert torch.equal(a.tokens, b.tokens)
    for name in ("logits", "normed", "confidence"):
        assert difference(getattr(b, name), getattr(a, name)).relative_norm <= 1e-5
    assert all(whole.windows[p] is kept.windows[p] for p in kept.windows) and whole.tokens == TOKENS


def test_draft_reads_the_whole_block_and_the_window(weights):
    """Every state of the block moves with the first token, and with the oldest latent of the window."""
    drafter = ReferenceDrafter(make(weights))
    _, state = in_chunks(drafter.decoder, [TOKENS])
    base = drafter.draft(state, 7).normed
    assert (difference_per_row(drafter.draft(state, 8).normed, base) > 1e-3).all()
    window = state.windows["mtp.0.attn."]
    assert len(window) == WINDOW
    state.windows["mtp.0.attn."] = torch.cat([-window[:1], window[1:]])
    assert (difference_per_row(drafter.draft(state, 7).normed, base) > 1e-5).all()


def difference_per_row(got, want):
    return (got - want).norm(dim=1) / want.norm(dim=1)


def test_markov_chain_agrees_with_a_float64_loop(weights):
    decoder = make(weights)
    drafter = ReferenceDrafter(decoder)
    _, state = in_chunks(decoder, [TOKENS])
    got, previous = drafter.draft(state, 7), 7
    hidden = drafter.hidden(state, 7).double()
    embed, head = (weights[f"mtp.2.markov_head.{n}.weight"].double() for n in ("embed", "head"))
    for i in range(5):
        logits = weights["head.weight"].double() @ got.normed[i].double() + head @ embed[previous]
        confidence = weights["mtp.2.confidence_head.proj.weight"][0].double() @ torch.cat([hidden[i], embed[previous]])
        assert difference(got.logits[i], logits).relative_norm <= 1e-5
        assert abs(got.confidence[i] - confidence) <= 1e-4 * max(1, abs(confidence))
        previous = int(logits.argmax())
        assert previous == got.tokens[i]


# ---------------------------------------------------------------------------- rounding


def test_rounding_grows_with_what_is_lost(weights):
    """With selection and routing held still, finer formats are nearer to float32.

    E4M3 records err by about 2**-5 per value, E2M1 by about 2**-3; bfloat16 activations come on top.
    """
    spec = replace(SPEC, index_topk=TOKENS)
    steady = weights | {name: 8 * tensor for name, tensor in weights.items() if name.endswith("gate.bias")}

    def error(policy):
        got = ReferenceDecoder(spec, steady, TOKEN_CLASSES, policy).logits(SEQUENCE)
        return difference(got, exact).relative_norm

    exact = ReferenceDecoder(spec, steady, TOKEN_CLASSES).logits(SEQUENCE)
    bf16, caches, engine, released = map(error, (
        rounding.Rounding(activation=rounding.bf16), rounding.ENGINE_CACHES, rounding.ENGINE, rounding.RELEASED))
    assert 1e-3 < bf16 < caches < released < 0.3
    assert bf16 < engine < released


@pytest.mark.parametrize("control", sorted(CONTROLS))
def test_a_broken_rule_moves_the_logits(weights, control):
    right = make(weights, rounding.ENGINE_CACHES).logits(SEQUENCE, IMAGE)
    broken = CONTROLS[control](SPEC, weights, TOKEN_CLASSES, rounding.ENGINE_CACHES).logits(SEQUENCE, IMAGE)
    assert difference(broken, right).relative_norm > 1e-3


def nearest(x, values):
    """The value nearest to each x, ties to the even code; `values` ascending, code = index."""
    out = []
    for item in x.tolist():
        size = min(abs(item), values[-1])
        code = min(range(len(values)), key=lambda c: (abs(values[c] - size), c % 2))
        out.append(math.copysign(values[code], item))
    return torch.tensor(out)


def test_codes_are_the_nearest_values():
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for values, function in ((e4m3, rounding.e4m3), (e2m1, rounding.e2m1)):
        middles = [(a + b) / 2 for a, b in zip(values, values[1:])]
        x = torch.tensor(values + middles + [1000.0, 6.0001, 448.1])
        x = torch.cat([x, -x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(1e4))])
        assert torch.equal(function(x), nearest(x, values))


def test_power_of_two_is_exact_at_every_exponent():
    exponents = torch.arange(-126, 127)
    powers = torch.tensor([2.0**e for e in exponents.tolist()])
    assert torch.equal(rounding.power_of_two(powers), powers)
    above = torch.nextafter(powers, torch.tensor(math.inf))
    assert torch.equal(rounding.power_of_two(above), 2 * powers)
    assert torch.equal(rounding.power_of_two(torch.nextafter(2 * powers, torch.tensor(0.0))), 2 * powers)


@pytest.mark.parametrize("name, group, scale_of, values", [
    ("q8", 32, lambda a: 2.0 ** math.ceil(math.log2(max(a, 1e-4) / 448)), "e4m3"),
    ("q4m", 32, lambda a: 2.0 ** math.ceil(math.log2(a / 6)), "e2m1"),
    ("q4n", 16, lambda a: float(torch.tensor(a / 6).to(torch.float8_e4m3fn)), "e2m1"),
])
def test_cache_formats_agree_with_a_scalar_derivation(name, group, scale_of, values):
    table = {"e4m3": torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist(),
             "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]}[values]
    x = torch.randn(8, 2 * group, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-4, 4)[:, None]
    function = getattr(rounding, name)
    got = function(x, group)
    for row in range(8):
        for part in (slice(0, group), slice(group, 2 * group)):
            scale = scale_of(x[row, part].abs().max().item())
            assert torch.equal(got[row, part], nearest(x[row, part] / scale, table) * scale)


def test_record_keeps_the_rotated_tail_in_bfloat16():
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(4))
    got = rounding.record(x)
    assert torch.equal(got[:, 448:], x[:, 448:].bfloat16().float())
    assert torch.equal(got[:, 64:128], rounding.q8(x[:, 64:128], 64))
    # One scale for all 128: next to 300, the value 0.001 falls to the smallest E4M3 subnormal.
    one_scale = rounding.index_row(torch.cat([torch.full((1, 64), 1e-3), torch.full((1, 64), 300.0)], 1))
    assert one_scale[0, 0] == 2**-9


# ---------------------------------------------------------------------------- parts


def test_yarn_slows_the_slow_pairs_only():
    """model_spec section 3: pairs up to 15 turn as they would, from 25 on 16 times slower."""
    got = compress_frequencies(ModelSpec()).double()
    plain = torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    ratio = (plain / got)
    assert torch.allclose(ratio[:16], torch.ones(16, dtype=torch.float64), rtol=1e-5)
    assert torch.allclose(ratio[25:], torch.full((7,), 16.0, dtype=torch.float64), rtol=1e-5)
    assert (ratio[15:26].diff() > 0).all()


def test_published_engram_multipliers():
    published = {
        1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    }
    for layer, multipliers in published.items():
        assert engram_multipliers(ModelSpec(), layer).tolist() == multipliers


def test_engram_rows_agree_with_whole_numbers(weights):
    """Python integers cannot wrap; every column stays in its own range of the table."""
    decoder = make(weights)
    ngrams = decoder.ngrams(decoder.start(), SEQUENCE, IMAGE)
    for layer in (SPEC.layers[1], SPEC.layers[3]):
        got, m = decoder.engram_rows(layer, ngrams), engram_multipliers(SPEC, layer.index).tolist()
        primes = [p for order in SPEC.engram_primes[layer.engram] for p in order]
        for t, ids in enumerate(ngrams.tolist()):
            want = []
            for column, prime in enumerate(primes):
                mixed = 0
                for i in range(column // SPEC.engram_n_heads + 2):
                    mixed ^= ids[i] * m[i]
                want.append(mixed % prime + sum(primes[:column]))
            assert got[t].tolist() == want
        assert got.max() < SPEC.engram_num_embeddings[layer.engram]


def test_keep_best_takes_the_first_of_equals_and_nothing_hidden():
    scores = torch.tensor([[0.0, 0.0, 1.0, 0.0], [-math.inf, 2.0, -math.inf, -math.inf], [3.0, 2.0, 1.0, 0.0]])
    assert keep_best(scores, 2).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
    assert keep_best(scores, 9).sum(1).tolist() == [4, 1, 4]
    assert keep_best(torch.zeros(2, 0), 3).shape == (2, 0)


# ---------------------------------------------------------------------------- weights


def test_decode_agrees_with_scalar_loops():
    """A ragged FP8 matrix, whose last tiles are cut, and packed FP4."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 126, (40, 70), generator=generator).byte().view(torch.float8_e4m3fn)
    scale = torch.randint(110, 140, (2, 3), generator=generator).byte()
    got = decode(codes, scale.view(torch.float8_e8m0fnu))
    for n in (0, 31, 32, 39):
        for k in (0, 31, 32, 69):
            assert got[n, k] == codes[n, k].item() * 2.0 ** (scale[n // 32, k // 32].item() - 127)
    packed = torch.randint(0, 256, (3, 32), generator=generator).byte()
    scale = torch.randint(110, 140, (3, 2), generator=generator).byte()
    got = decode(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for n in range(3):
        for k in range(64):
            code = packed[n, k // 2].item() >> (4 * (k % 2)) & 15
            assert got[n, k] == (-1 if code & 8 else 1) * values[code & 7] * 2.0 ** (scale[n, k // 32].item() - 127)


TINY = replace(
    SPEC, num_hidden_layers=3, compress_ratios=(0, 0, 1), num_nextn_predict_layers=0, kv_source_layer_ids=(2,),
    index_source_layer_ids=(2,), candidate_source_layer_id=-1, engram_layer_ids=(1,), engram_num_embeddings=(28000,),
)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two shards: an FP8, an FP4 and an engram tensor, the rest bfloat16 and float32."""
    stored = {}
    for name, tensor in random_weights(TINY, seed=2).items():
        stem = name.removesuffix("weight")
        if name == "layers.0.attn.wq_a.weight":
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[stem + "scale"] = torch.full((1, 2), 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif name == "layers.0.ffn.experts.3.w1.weight":
            stored[name] = torch.randint(-128, 128, (32, 32)).to(torch.int8)
            stored[stem + "scale"] = torch.full((32, 2), 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        elif ".engram.embed." in name or ".hc_" in name:
            stored[name] = tensor
        else:
            stored[name] = tensor.bfloat16()
    names = list(stored)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: stored[name] for name in part}, tmp_path / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path, stored


def test_load_weights_from_shards_and_from_one_file(folder, tmp_path_factory):
    path, stored = folder
    single = tmp_path_factory.mktemp("single")
    save_file(stored, single / "model.safetensors")
    loaded = load_weights(path, TINY)
    assert loaded.keys() == tensor_shapes(TINY).keys()
    assert torch.equal(loaded["layers.0.attn.wq_a.weight"], stored["layers.0.attn.wq_a.weight"].float() / 2)
    assert loaded["layers.1.engram.embed.weight"].dtype == torch.float8_e4m3fn
    other = load_weights(single, TINY)
    assert all(torch.equal(other[name].float(), loaded[name].float()) for name in loaded)
    assert ReferenceDecoder(TINY, loaded, TOKEN_CLASSES).logits(SEQUENCE[:9]).isfinite().all()


def truncate(path):
    data = (path / "b.safetensors").read_bytes()
    (path / "b.safetensors").write_bytes(data[: len(data) // 2])


def drop_from_index(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["layers.2.attn.indexer.wk.weight"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("damage, message", [
    (lambda path: (path / "b.safetensors").unlink(), "lacks the shard b.safetensors"),
    (truncate, "b.safetensors cannot be read"),
    (drop_from_index, "has no tensor layers.2.attn.indexer.wk.weight"),
    (lambda path: (path / "model.safetensors.index.json").unlink(), "has neither model.safetensors.index.json nor"),
    (lambda path: (path / "model.safetensors.index.json").write_text("{"), "Expecting property name"),
    (lambda path: (path / "model.safetensors.index.json").write_text("{}"), "weight_map"),
])
def test_a_damaged_checkpoint_is_one_line_and_a_hint(folder, damage, message):
    path, _ = folder
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(path, TINY)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_another_size_is_refused(folder):
    path, _ = folder
    with pytest.raises(CheckpointError, match=r"embed.weight is \[256, 64\], config.json says \[256, 128\]"):
        load_weights(path, replace(TINY, hidden_size=128))
