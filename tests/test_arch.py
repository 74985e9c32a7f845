# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.ampere import arch
from vllm.ampere.errors import SelectionError


@pytest.mark.parametrize("name", ["sm80", "sm86"])
def test_assumed_architecture_is_that_of_every_cuda_device(monkeypatch, name):
    monkeypatch.setenv("VLLM_AMPERE_ASSUME", name)
    assert arch.of_device("cuda").name == arch.of_device("cuda:1").name == name
    assert arch.of_device("cpu").name == "cpu"


def test_unknown_assumption_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_AMPERE_ASSUME", "sm90")
    with pytest.raises(SelectionError, match="VLLM_AMPERE_ASSUME is 'sm90'"):
        arch.of_device("cuda")
