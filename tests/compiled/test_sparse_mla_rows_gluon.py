# SPDX-License-Identifier: Apache-2.0
"""`sparse_mla_rows` in Gluon, which no interpreter runs: its cases, and its barriers."""

import re

import pytest

from tests.compiled.test_sparse_mla_rows import OP, given
from vllm.ampere.testing import ptx_launch, ptx_machine
from vllm.ampere.testing.parity import assert_parity, produce

GLUON = next(i.function for i in OP.implementations if i.name == "gluon")
LOOP = "$L__BB0_2:"


@pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)
def test_equals_the_reference(case):
    got = produce(OP, GLUON, case.inputs(1))
    assert_parity(OP, got, produce(OP, OP.reference, case.inputs(1)), case.name)


def _without(ptx: str, change: str) -> str:
    """The kernel without one barrier of its loop, or with its wait a group short."""
    before, loop = ptx.split(LOOP)
    mark = "cp.async.wait_group" if change == "wait" else "bar.sync"
    pieces = loop.split(mark)
    assert len(pieces) > 2
    at = 1 if change == "wait" else 1 + ("first", "second", "third").index(change)
    if change == "wait":
        pieces[at] = re.sub(r"^(\s*)1;", r"\g<1>2;", pieces[at])
    weaker = mark if change == "wait" else "bar.warp.sync"
    return before + LOOP + mark.join(pieces[:at]) + weaker + mark.join(pieces[at:])


@pytest.mark.parametrize("change", ["first", "second", "third", "wait"])
def test_no_barrier_of_the_loop_is_one_too_many(monkeypatch, change):
    compiled = ptx_launch.compiled_ptx
    inputs = given("cpu", tokens=1, width=70)
    inputs["lens"].fill_(70)
    inputs["rows"].nan_to_num_()
    GLUON(**inputs)

    def weakened(*key):
        ptx, shared = compiled(*key)
        return _without(ptx, change), shared

    monkeypatch.setattr(ptx_launch, "compiled_ptx", weakened)
    with pytest.raises(ptx_machine.MachineFault, match="without a barrier|may still write|never written"):
        GLUON(**inputs)
