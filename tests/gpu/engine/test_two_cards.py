# SPDX-License-Identifier: Apache-2.0
"""Two cards against one: stages bit by bit where the batches are equal, a tensor group as near as rounding lets it.

The measure of "equal" is taken in the same session: two identical engines on one card. Where these have the same bits,
stages must have them too; where they do not, stages may be off by 1.5 times their largest difference. A tensor group sums
in another order, and a stage that ends behind the last KV source runs rows that one card leaves out of a long step, so
that its products are of another size. Both are held against the reference decoder as well, from which one card is off by
rounding alone.
"""

from collections import Counter

import pytest
import torch

from tests.e2e.collectives import expected, in_layers
from tests.e2e.replay import engine_logits, replaying
from tests.e2e.stage_differences import differences, drafted
from vllm.ampere.pipeline_cut import CANDIDATES, LATENT, TOPK
from vllm.ampere.planner.pipeline import payload_bytes

from .measures import common, rms
from .reference import decoder_of
from .two_cards import AGAIN, ALONE, CHUNK, NEW_TOKENS, ONE, ONE_CARD, SCENARIOS, STAGES, TENSOR, Engines, rows

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards"),
]
STAGED = [pytest.param(layout, id=str(layout)) for layout in (*STAGES, ONE_CARD)]
GROUPS = [pytest.param(layout, id=str(layout)) for layout in TENSOR]
GENERATED = [name for name in ALONE if name != "prompt"]
# What two roundings of one product may shift a log-probability by, of which two tokens are as likely.
NEAR_TIE = 0.1


@pytest.fixture(scope="module")
def engines(request, tmp_path_factory):
    """Engines of the layouts that the collected tests of this module name, and on one card."""
    named = [item.callspec.params["layout"] for item in request.session.items
             if item.module is request.module and hasattr(item, "callspec")]
    engines = Engines(tmp_path_factory.mktemp("two_cards"))
    engines.start([ONE, AGAIN, *named, *(layout.twin for layout in named)])
    return engines


def apart(seen: dict, want: dict) -> float:
    """rms between the log-probabilities of two runs of one request, up to and with the first token that differs."""
    same = common(seen["answers"][0], want["answers"][0]) + 1
    return rms(rows(seen, 512)[:same], rows(want, 512)[:same])


def one_card_twice(engines) -> tuple[set[str], float]:
    """In what two identical engines differ, and the largest rms of their log-probabilities over all scenarios."""
    pairs = [(engines.scenario(AGAIN, name), engines.scenario(ONE, name)) for name in ALONE]
    return set().union(*(differences(*pair) for pair in pairs)), max(apart(*pair) for pair in pairs)


def assert_near(engines, figures, layout, scenario):
    """As near to the reference as one card, and as near to one card as that is to the reference."""
    seen, want = engines.scenario(layout, scenario), engines.scenario(layout.twin, scenario)
    spread, given, errors = one_card_twice(engines)[1], SCENARIOS[scenario][0][0], []
    for run in (seen, want):
        with torch.device("cuda"):
            decoder = replaying(decoder_of(engines.checkpoint))
            logits = engine_logits(decoder, given, run["answers"][0], run["cached"], CHUNK)
        errors.append(rms(rows(run, 512), logits.log_softmax(-1).cpu()))
    figures[f"{layout}, {scenario}"] = (
        f"to one card {apart(seen, want):.4f}, to the reference {errors[0]:.4f}, one card to it {errors[1]:.4f}, "
        f"one card twice {spread:.4f}")
    assert apart(seen, want) <= 1.5 * max(spread, errors[1])
    assert errors[0] <= 1.25 * errors[1] + 0.01
    tokens, others = seen["answers"][0], want["answers"][0]
    same = common(tokens, others)
    if same < len(others):
        best, second = rows(want, 512)[same].topk(2).values.tolist()
        assert best - second < NEAR_TIE, f"token {same}: the best two differ by {best - second:.3f}"


def other_batches(engines, layout, scenario) -> bool:
    """Whether the first stage runs rows that one card leaves out: behind the last KV source, in steps that replay trims."""
    return layout.partition[0] > engines.spec.kv_source_layer_ids[-1] and scenario not in ("20", "prompt")


@pytest.mark.parametrize("scenario", ALONE)
@pytest.mark.parametrize("layout", STAGED)
def test_stages_equal_one_card(engines, figures, layout, scenario):
    """One request in flight: the same batches, so the same bits as far as one card repeats its own."""
    if other_batches(engines, layout, scenario):
        return assert_near(engines, figures, layout, scenario)
    seen, want = engines.scenario(layout, scenario), engines.same(layout, scenario)
    differ, (unlike, spread) = differences(seen, want), one_card_twice(engines)
    figures[f"{layout}, {scenario}"] = f"differ in {differ or 'nothing'} (rms {apart(seen, want):.6f})"
    figures["one card twice"] = f"differ in {unlike or 'nothing'} (rms {spread:.6f})"
    assert drafted(want) and seen["answers"][0]
    if not unlike:
        assert not differ
        assert seen["answers"] == want["answers"]
    assert apart(seen, want) <= 1.5 * spread


@pytest.mark.parametrize("layout", STAGED)
def test_several_requests_equal_the_replay_of_their_schedule(engines, figures, layout):
    """Six requests over stages, and one card that executes the same scheduler outputs."""
    seen, want = engines.scenario(layout, "several"), engines.same(layout, "several")
    assert any(len(requests) > 1 for requests, *_ in seen["steps"]) and drafted(want)
    found = differences(seen, want)
    figures[f"{layout}, several"] = f"differ in {found or 'nothing'}"
    if other_batches(engines, layout, "several"):
        assert found <= {"log-probabilities", "taps"}
    elif not one_card_twice(engines)[0]:
        assert not found
    alone = engines.scenario(layout.twin, "several")["answers"]
    equal = [common(tokens, others) for tokens, others in zip(seen["answers"], alone)]
    assert sum(equal) > 0.5 * NEW_TOKENS * len(equal), equal  # by itself it batches otherwise, yet writes the same text


@pytest.mark.parametrize("layout", STAGED)
def test_bytes_over_the_cut(engines, figures, layout):
    """What the first stage sends is what the planner counts, for the rows of the step and those that replay keeps."""
    spec, start = engines.spec, layout.partition[0]
    crossed, sums = set(), Counter()
    for name, run in engines.result(layout)["scenarios"].items():
        first, last = run["workers"]
        assert first["sent"] and not last["sent"]
        for sent in first["sent"]:
            kept = sent["hidden_states"][1][0]
            total = sent[LATENT][1][0] if LATENT in sent else kept
            counted = payload_bytes(spec, start, True, total, kept, None if CANDIDATES in sent else 1)
            assert {tensor: nbytes for tensor, (_, _, nbytes) in sent.items()} == counted
            crossed |= set(sent)
            sums[name] += sum(counted.values())
    relayed = {4: set(), 5: {LATENT, CANDIDATES, TOPK}}[start]
    assert crossed & {LATENT, CANDIDATES, TOPK} == relayed
    figures[f"{layout}, bytes over the cut"] = dict(sums)


@pytest.mark.parametrize("layout", [*STAGED, *GROUPS])
def test_graphs_and_replay(engines, figures, layout):
    """Each worker runs FULL and PIECEWISE graphs, or none where it is eager, and replay leaves rows out of long steps."""
    result = engines.result(layout)
    workers = zip(*(run["workers"] for run in result["scenarios"].values()))
    modes = [Counter(mode for part in parts for mode in part["graphs"]) for parts in workers]
    assert len(modes) == 2
    figures[f"{layout}, steps in graphs"] = list(map(dict, modes))
    for counted in modes:
        assert set(counted) == (set() if layout.eager else {"FULL", "PIECEWISE"})
    trims = [event for event in result["trace"] if event["event"] in ("replay_trim", "replay_rows")]
    assert any(event["rows"] == CHUNK and event["kept"] < CHUNK for event in trims)
    assert result["scenarios"]["warm"]["cached"] > 2_000


@pytest.mark.parametrize("scenario", GENERATED)
@pytest.mark.parametrize("layout", GROUPS)
def test_tensor_group_against_one_card(engines, figures, layout, scenario):
    assert_near(engines, figures, layout, scenario)


@pytest.mark.parametrize("layout", [case for case in GROUPS if case.values[0].eager])
def test_every_collective_once_a_layer(engines, figures, layout):
    """A step sums twice a layer, no more and no less, on both ranks alike."""
    spec, result = engines.spec, engines.result(layout)
    for run in result["scenarios"].values():
        first, second = run["workers"]
        assert first["collectives"] == second["collectives"]
        steps = len(first["read"])
        assert steps and in_layers(first) == expected(spec, range(spec.num_hidden_layers), steps)
    outside = Counter(name for where, name, _ in first["collectives"] if where == "outside")
    figures[f"{layout}, collectives outside the layers, in {steps} steps"] = dict(outside)
    figures[f"{layout}, vLLM's own all-reduce"] = [stage["custom_all_reduce"] for stage in result["stages"]]
