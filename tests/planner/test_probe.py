# SPDX-License-Identifier: Apache-2.0
"""Measuring links: the same code over gloo, with processes in place of cards, and its figures fed back to a plan."""

import functools
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.ampere.cli import main as cli
from vllm.ampere.errors import AmpereError
from vllm.ampere.nodes import Interface, Node
from vllm.ampere.planner import inventory, probe
from vllm.ampere.planner.inventory import Inventory, Link, LinkKind, Sample, parse
from vllm.ampere.planner.latency import all_reduce_us
from vllm.ampere.testing.engine import free_port

pytest.importorskip("torch", reason="the measurement runs in PyTorch")
LIMIT_S = 240


def check(samples, link, cards, per_node=2):
    """Every size of every kind in positive figures; the largest takes longest (a busy machine mixes up small ones)."""
    times = defaultdict(list)
    for each in samples:
        times[each.what, each.link, each.cards].append((each.nbytes, each.us))
    sizes = list(probe.SIZES)
    assert {key: [nbytes for nbytes, _ in found] for key, found in times.items()} == {
        ("all-reduce", link, cards): sizes, ("message", link, 2): sizes, ("from host", "host", per_node): sizes[-1:],
    }
    for found in times.values():
        *smaller, largest = (us for _, us in found)
        assert all(0 < us < largest for us in smaller)


def test_two_processes_as_cards(monkeypatch, capsys, tmp_path):
    """The command on a box of two: its JSON is an inventory, and a plan of that box waits for those links."""
    box = Inventory(cards=2, card_gib=79.0, island=1)
    monkeypatch.setattr(inventory, "detect", lambda visible: box)
    monkeypatch.setattr(probe, "measure", functools.partial(probe.measure, device="cpu", limit_s=LIMIT_S))
    assert cli.main(["plan", "--probe", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == "timing 2 cards; nothing else should run on them\n"
    file = tmp_path / "box.json"
    file.write_text(out)
    measured = inventory.load(file)
    assert measured.model_copy(update={"links": {}, "samples": ()}) == box
    check(measured.samples, "socket", 2)
    (link,) = measured.links.values()
    assert list(measured.links) == [LinkKind.SOCKET] and link.gb_s > 0
    sums = [each for each in measured.samples if each.what == "all-reduce"]
    for each in (sums[0], sums[-1]):
        assert all_reduce_us(link, 2, each.nbytes) == pytest.approx(each.us, rel=1e-6)
    cli.main(["plan", "--inventory", str(file), "--partition", "40", "--expert-parallel", "--no-draft", "--format", "json"])
    step = json.loads(capsys.readouterr().out)["step_ms"]
    assert step["reductions"] == pytest.approx(80 * all_reduce_us(link, 2, 10_240) / 1e3)


def test_two_processes_as_nodes(monkeypatch):
    monkeypatch.setattr(probe, "_PORT", free_port())
    box = Inventory(nodes=2, cards=1, card_gib=79.0)
    found = {}

    def run(rank):
        node = Node(rank, 2, "127.0.0.1", Interface("lo", "127.0.0.1"))
        found[rank] = probe.measure(box, node, "cpu", LIMIT_S)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert found[1] == box and list(found[0].links) == [LinkKind.NETWORK]
    check(found[0].samples, "network", 2, per_node=1)


@pytest.mark.parametrize("shape, link, island, expected", [
    ("8x80", "pcie", 4, {LinkKind.PCIE: 4, LinkKind.SOCKET: 8}),
    ("8x80", "pcie", 8, {LinkKind.PCIE: 8}),
    ("8x80", "nvlink", 4, {LinkKind.NVLINK: 8}),
    ("2x8x40", "nvlink", 4, {LinkKind.NVLINK: 8, LinkKind.NETWORK: 16}),
    ("1x80", "pcie", 1, {}),
])
def test_each_link_is_measured_where_it_is_the_slowest(shape, link, island, expected):
    box = parse(shape, link).model_copy(update={"island": island})
    found = probe.groups(box)
    assert {kind: len(members) for kind, members in found.items()} == expected
    assert all(box.kind_between(members[0], members[-1]) is kind for kind, members in found.items())


def sample(cards, nbytes, us):
    return Sample(what="all-reduce", link="pcie", cards=cards, nbytes=nbytes, us=us)


@given(st.integers(2, 16), st.floats(0.1, 1e3), st.floats(0.1, 1e3))
def test_a_link_is_found_again_from_its_times(cards, latency_us, gb_s):
    link = Link(latency_us=latency_us, gb_s=gb_s)
    samples = [sample(cards, nbytes, all_reduce_us(link, cards, nbytes)) for nbytes in reversed(probe.SIZES)]
    found = probe.fit(samples)
    assert found.latency_us == pytest.approx(latency_us, rel=1e-3) and found.gb_s == pytest.approx(gb_s, rel=1e-6)


def test_times_that_contradict_each_other():
    with pytest.raises(AmpereError, match="over pcie 67108864 bytes took 40 us and 10240 took 50") as raised:
        probe.fit([sample(8, 10_240, 50.0), sample(8, 64 << 20, 40.0)])
    assert raised.value.hint


def test_a_time_below_the_fixed_cost():
    assert probe.fit([sample(8, 10_240, 5.0), sample(8, 64 << 20, 4000.0)]).latency_us == probe.LEAST_LATENCY_US


def broken(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(code)
    return script


def test_a_measurement_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_SCRIPT", broken(tmp_path, "raise RuntimeError('no such device')"))
    with pytest.raises(AmpereError, match="the links could not be measured: RuntimeError: no such device"):
        probe.measure(parse("2x80"), device="cpu", limit_s=LIMIT_S)


def test_a_measurement_that_hangs(monkeypatch, tmp_path):
    """And leaves no rank behind."""
    code = "import os, pathlib, time; pathlib.Path(__file__).with_name(f'{os.getpid()}.rank').touch(); time.sleep(1000)"
    monkeypatch.setattr(probe, "_SCRIPT", broken(tmp_path, code))
    with pytest.raises(AmpereError, match="the links were not measured in 10 s"):
        probe.measure(parse("2x80"), device="cpu", limit_s=10)
    ranks = [int(path.stem) for path in tmp_path.glob("*.rank")]
    assert len(ranks) == 2 and not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_without_pytorch(monkeypatch):
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    with pytest.raises(AmpereError, match="PyTorch, which is not installed"):
        probe.measure(parse("2x80"))


@pytest.mark.parametrize("words, status, message", [
    ((), 1, "there is nothing to measure: cannot see this machine's cards"),
    (("--format", "args"), 2, "--format args prints one layout"),
    (("--preset", "a100-80g-x8-tp8"), 2, "not allowed with argument"),
])
def test_mistakes_are_one_line_and_a_hint(monkeypatch, capsys, words, status, message):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cli.main(["plan", "--probe", *words]) == status
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert not out and first.startswith("error: ") and message in first and second.startswith("hint: ")


def test_nodes_are_the_probes(capsys):
    assert cli.main(["plan", "--gpus", "2x8x40", "--node-rank", "0"]) == 2
    assert "go with --probe" in capsys.readouterr().err
