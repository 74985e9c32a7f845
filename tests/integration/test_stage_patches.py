# SPDX-License-Identifier: Apache-2.0
"""What patches 0100 and 0110 decide, without an engine: cache layouts of unequal stages, and whose drafts are used."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus


def resolve(*supported):
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout=None), kv_transfer_config=None)
    return resolve_kv_cache_layout(config, [list(names) for names in supported]).name


@pytest.mark.parametrize("supported, chosen", [
    ((["LBNHC", "BLHNC"], ["LBNHC", "BLHNC"]), "LBNHC"),
    ((["LBNHC", "BLHNC"], ["BLHNC"]), "BLHNC"),
    ((["BLHNC"], ["LBNHC", "LBHNC", "BLHNC"]), "BLHNC"),
    # The order is that of the worker with the fewest.
    ((["LBNHC", "LBHNC", "BLHNC"], ["BLHNC", "LBHNC"]), "BLHNC"),
])
def test_layouts_that_all_stages_support(supported, chosen):
    assert resolve(*supported) == chosen


def test_no_common_layout_is_refused():
    with pytest.raises(AssertionError, match="share no KV cache layout"):
        resolve(["LBNHC"], ["BLHNC"])


def request(**state):
    given = {"num_in_flight_tokens": 0, "status": RequestStatus.RUNNING, "is_prefill_chunk": False, "spec_token_ids": []}
    return SimpleNamespace(**given | state, is_finished=lambda: False)


@pytest.mark.parametrize("state, taken", [
    ({}, [5, 6]),
    ({"num_in_flight_tokens": 188}, []),  # the next chunk of the prompt is under way
    ({"status": RequestStatus.PREEMPTED}, []),
    ({"status": RequestStatus.WAITING}, []),
    ({"is_prefill_chunk": True}, []),
])
def test_drafts_go_to_requests_whose_next_tokens_they_are(state, taken):
    scheduler = SimpleNamespace(requests={"a": request(**state)},
                                structured_output_manager=SimpleNamespace(validate_tokens=lambda request, tokens: tokens))
    Scheduler.update_draft_token_ids(scheduler, DraftTokenIds(["a", "gone"], [[5, 6], [7, 8]]))
    assert scheduler.requests["a"].spec_token_ids == taken
