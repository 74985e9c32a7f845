# SPDX-License-Identifier: Apache-2.0
"""Every check of the machine on a machine of captured files: silent where all is well, and firing on one change."""

import pytest

from tests.doctor.expected import ONE_NODE, TWO_NODES
from tests.doctor.machine_cases import GPU, HOST
from tests.doctor.software_cases import OVERLAY_CASES, SOFTWARE
from tests.doctor.topology_cases import CHECKPOINT, PEER, TOPOLOGY
from vllm.ampere.doctor import peer
from vllm.ampere.doctor.catalogue import codes
from vllm.ampere.doctor.findings import Status
from vllm.ampere.doctor.run import CHECKS, examine, run_check

CASES = [*HOST, *GPU, *SOFTWARE, *OVERLAY_CASES, *CHECKPOINT, *TOPOLOGY, *PEER]
FIRES = (Status.FAIL, Status.WARN)


@pytest.fixture
def machine(machine, checkpoint):
    machine.checkpoint = checkpoint
    return machine


@pytest.mark.parametrize("expected", CASES, ids=str)
def test_one_change(machine, expected):
    asked = expected.change(machine) or {}
    finding = machine.check(expected.code, **asked)
    assert (finding.status, finding.code) == (expected.status, expected.code), finding.seen
    assert expected.words in finding.seen
    assert "the check failed" not in finding.seen
    assert bool(finding.fix) == (finding.status in FIRES), "what fires has a fix, and nothing else has"


def well(machine, checkpoint) -> dict[str, Status]:
    """Code to status of all that applies to a good machine, asked for everything that can be asked."""
    other = peer.Report(peer.SCHEMA, peer.facts(machine.case(model=checkpoint)), [])
    cases = [machine.case(model=checkpoint, peer=other), machine.case(preset=ONE_NODE)]
    machine.each_card(memory_bytes=int(39.39 * 2**30))
    cases.append(machine.case(preset=TWO_NODES))
    return {finding.code: finding.status for case in cases for finding in examine(case)}


def test_a_good_machine_is_well(machine, checkpoint):
    statuses = well(machine, checkpoint)
    assert statuses == dict.fromkeys(CHECKS, Status.OK)


def test_every_code_of_the_machine_has_a_case_that_fires_and_one_that_does_not(machine, checkpoint):
    """The second one is the good machine, of which each check says ok."""
    quiet = {code for code, status in well(machine, checkpoint).items() if status is Status.OK}
    firing = {case.code for case in CASES if case.status in FIRES}
    wanted = {code for code in codes() if codes()[code].area != "logs"}
    assert firing == quiet == wanted == set(CHECKS)


def test_a_tensor_group_over_two_nodes_is_warned_of(machine):
    """No preset has one; a layout of one's own may."""
    case = machine.case(preset=ONE_NODE)
    box = case.preset.inventory.model_copy(update={"nodes": 2, "cards": 4})
    layout = case.preset.layout.model_copy(update={"tensor": 8, "partition": (40,)})
    case.preset = case.preset.model_copy(update={"inventory": box, "layout": layout})
    finding = run_check("AMP602", case)
    assert finding.status is Status.WARN and "a tensor group spans nodes: 80 reductions x " in finding.seen
