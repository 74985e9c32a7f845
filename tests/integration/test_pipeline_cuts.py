# SPDX-License-Identifier: Apache-2.0
"""Which model class a stage gets, and what is refused beside a cut inside a KV-sharing group."""

from types import SimpleNamespace

import pytest

from vllm.ampere.errors import UsageError
from vllm.ampere.model_spec import ModelSpec

pytestmark = pytest.mark.vllm


def given(monkeypatch, partition: str, **changed):
    """As much of a VllmConfig as is looked at, of the release over a pipeline."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    parallel = {"pipeline_parallel_size": len(partition.split(",")), "use_ubatching": False, "decode_context_parallel_size": 1}
    config = {"kv_transfer_config": None, "lora_config": None, **changed}
    for name in parallel.keys() & config.keys():
        parallel[name] = config.pop(name)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=ModelSpec()), parallel_config=SimpleNamespace(**parallel), **config)


REFUSED = [({"use_ubatching": True}, "microbatches"), ({"kv_transfer_config": object()}, "a KV connector"),
           ({"lora_config": object()}, "LoRA"), ({"decode_context_parallel_size": 2}, "decode context parallelism")]


@pytest.mark.parametrize("changed, what", REFUSED, ids=[what for _, what in REFUSED])
def test_refused_beside_the_relay_and_nowhere_else(monkeypatch, changed, what):
    from vllm.ampere.integration.pipeline import cuts

    with pytest.raises(UsageError, match=f"^{what} cannot run with a pipeline stage that starts at layer 28: ") as error:
        cuts.check(given(monkeypatch, "14,14,12", **changed))
    assert error.value.hint
    cuts.check(given(monkeypatch, "14,6,20", **changed))
    cuts.check(given(monkeypatch, "14,14,12"))


@pytest.mark.parametrize("partition, starts", [("40", []), ("20,20", []), ("8,12,20", []), ("14,14,12", [28]), ("10,10,10,10", [10, 30]),
                                               ("7,7,7,7,6,6", [7, 21, 28, 34])])
def test_the_cuts_of_an_engine(monkeypatch, partition, starts):
    from vllm.ampere.integration.pipeline import cuts

    assert [cut.start for cut in cuts.relayed_cuts(given(monkeypatch, partition))] == starts


@pytest.mark.parametrize("partition, ours", [("40", False), ("20,20", False), ("8,12,20", False), ("14,14,12", True)])
def test_upstreams_model_serves_wherever_only_the_streams_cross(monkeypatch, partition, ours):
    from vllm.ampere.integration import gate
    from vllm.ampere.integration.cpu import model as bindings  # noqa: F401  (upstream's model is built on them)
    from vllm.ampere.integration.pipeline import stage

    config = given(monkeypatch, partition)
    assert stage.model_class(config) is (stage.StagedModel if ours else None)
    monkeypatch.setattr(gate, "architecture", lambda: None)
    assert stage.model_class(config) is None
