# SPDX-License-Identifier: Apache-2.0
"""Tensors between pipeline stages: sent by upstream's worker over gloo, and copied by the runner's hooks."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.ampere.pipeline_cut import CANDIDATES
from vllm.ampere.testing.engine import free_port, run

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the four ranks of `exchange_ranks.py` sent or received: as served, then with everything sliced."""
    folder, port = tmp_path_factory.mktemp("exchange"), free_port()
    command = [str(Path(__file__).with_name("exchange_ranks.py")), str(port), str(folder)]
    ended = run(command, folder / "log", 300, {"VLLM_DIST_IDENT": f"exchange{port}"})
    assert ended.code == 0, ended.output[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_a_selection_arrives_as_its_own_rank_made_it(ranks, tensor_rank):
    """Two ranks hold the same entries in opposite orders; each one's next stage gets its own rows."""
    sent, received = ranks[tensor_rank][0], ranks[2 + tensor_rank][0]
    assert sent.keys() == received.keys() == {"hidden_states", "relay_topk"}
    for name in sent:
        assert torch.equal(sent[name], received[name]), name
    assert not torch.equal(sent["relay_topk"], ranks[1 - tensor_rank][0]["relay_topk"])


def test_slices_would_mix_the_orders(ranks):
    """The control: where a selection is sliced like the streams, a row names entries twice and lacks others."""
    row = ranks[2][1]["relay_topk"][1]
    assert len(row.unique()) == len(row) // 2
    assert torch.equal(ranks[2][1]["hidden_states"], ranks[0][1]["hidden_states"])


CONFIG = SimpleNamespace(candidate_topk_blocks=16, candidate_block_size=8, candidate_source_layer_id=1, compress_ratios=[0, 1])


def tensors(**given):
    from vllm.sequence import IntermediateTensors

    return IntermediateTensors(given)


@pytest.mark.parametrize("longest, sent", [(1, False), (128, False), (129, True), (4000, True)])
def test_candidates_are_sent_from_the_length_at_which_a_block_is_left_out(longest, sent):
    from vllm.ampere.integration.pipeline.exchange import send

    own = {"hidden_states": torch.randn(3, 4), CANDIDATES: torch.randint(16, (3, 16), dtype=torch.int32)}
    out = send(tensors(**own), tensors(**own), CONFIG, torch.tensor([5, longest], dtype=torch.int32))
    assert (CANDIDATES in out.tensors) == sent
    assert torch.equal(out["hidden_states"], own["hidden_states"])


def test_candidates_that_were_not_sent_are_all_blocks():
    from vllm.ampere.integration.pipeline.exchange import receive

    buffer = torch.full((3, 16), -7, dtype=torch.int32)
    assert receive(CANDIDATES, buffer, tensors(hidden_states=torch.zeros(3, 4))) is buffer
    assert torch.equal(buffer, torch.arange(16, dtype=torch.int32).expand(3, 16))
    with pytest.raises(KeyError):
        receive("hidden_states", buffer, tensors())


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_received_rows_land_in_place(rows):
    """Fewer rows than the step has, as many, and the padding of a larger captured batch."""
    from vllm.ampere.integration.pipeline.exchange import receive

    given, buffer = torch.randn(rows, 4), torch.full((5, 4), torch.nan)
    assert receive("hidden_states", buffer, tensors(hidden_states=given)) is buffer
    assert torch.equal(buffer[:rows], given[:5]) and buffer[rows:].isnan().all()


def test_the_models_rows_go_before_the_runners():
    """Features of earlier stages as they were received give way to those that follow this stage's rows."""
    from vllm.ampere.integration.pipeline.exchange import send

    received = tensors(aux_hidden_states_0=torch.zeros(8, 4), aux_hidden_states_1=torch.ones(8, 4))
    own = tensors(aux_hidden_states_0=torch.full((2, 4), 2.0))
    out = send(received, own, CONFIG, torch.tensor([9]))
    assert out["aux_hidden_states_0"].shape == (2, 4) and out["aux_hidden_states_1"].shape == (8, 4)
