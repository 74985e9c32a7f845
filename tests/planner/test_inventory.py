# SPDX-License-Identifier: Apache-2.0
"""Boxes from words, from files and from a driver that is played."""

import json
import sys
import types

import pytest

from vllm.ampere.errors import AmpereError, UsageError
from vllm.ampere.planner.inventory import LINKS, Inventory, LinkKind, detect, load, parse


def test_parse():
    box = parse("2x8x39.4", "nvlink")
    assert (box.nodes, box.cards, box.card_gib, box.link, box.total) == (2, 8, 39.4, LinkKind.NVLINK, 16)
    assert parse("8x80").link is LinkKind.PCIE


@pytest.mark.parametrize("shape", ["8x", "x80", "8*80", "8x80GB", "0x80", "8x0", "-8x80", "1x2x3x4", ""])
def test_parse_refuses(shape):
    with pytest.raises(UsageError) as raised:
        parse(shape)
    assert "\n" not in str(raised.value) and "8x80" in raised.value.hint


def test_slowest_link():
    box = parse("2x8x80")
    assert [box.kind_between(*ends) for ends in ((0, 3), (0, 7), (2, 5), (4, 7), (7, 8), (0, 15))] == [
        LinkKind.PCIE, LinkKind.SOCKET, LinkKind.SOCKET, LinkKind.PCIE, LinkKind.NETWORK, LinkKind.NETWORK,
    ]
    assert parse("2x8x80", "nvlink").kind_between(0, 7) is LinkKind.NVLINK


def test_measured_links_replace_the_defaults(tmp_path):
    file = tmp_path / "box.json"
    file.write_text(json.dumps({"cards": 8, "card_gib": 80, "links": {"socket": {"latency_us": 9, "gb_s": 5}}}))
    box = load(file)
    assert box.link_between(0, 7).latency_us == 9
    assert box.link_between(0, 3) == LINKS[LinkKind.PCIE]


def test_memory_bandwidth_by_size():
    assert parse("8x79.15").memory_gb_s == 1935
    assert parse("8x23.7").memory_gb_s == 936
    assert Inventory(cards=1, card_gib=80, card_gb_s=2039).memory_gb_s == 2039


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is not JSON"),
        ("[]", "valid dictionary"),
        ('{"cards": 8}', "card_gib: Field required"),
        ('{"cards": 0, "card_gib": 80}', "cards: Input should be greater than or equal to 1"),
        ('{"cards": 8, "card_gib": 80, "card": 1}', "card: Extra inputs are not permitted"),
        ('{"cards": 8, "card_gib": "eighty"}', "card_gib: Input should be a valid number"),
        ('{"cards": 8, "card_gib": Infinity}', "card_gib: Input should be a finite number"),
        ('{"cards": 8, "card_gib": 80, "link": "network"}', "link is the one inside a node"),
    ],
)
def test_load_refuses(tmp_path, content, words):
    file = tmp_path / "box.json"
    file.write_text(content)
    with pytest.raises(UsageError) as raised:
        load(file)
    assert words in str(raised.value) and "\n" not in str(raised.value) and raised.value.hint


def test_load_refuses_what_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "box.json")
    with pytest.raises(UsageError, match="Is a directory"):
        load(tmp_path)


class _Fault(Exception):
    pass


def _driver(names, sizes=None, nvlink=True, fault=False, sockets=None):
    """A driver of these cards; each keeps 870 MiB for itself, and `sockets` says on which socket each is."""
    def init():
        if fault:
            raise _Fault("Driver Not Loaded")

    def state(handle, link):
        if not nvlink:
            raise _Fault("Not Supported")
        return 1

    def memory(handle, version):
        return types.SimpleNamespace(total=(sizes or [80 * 2**30] * len(names))[handle], reserved=870 * 2**20)

    def ancestor(first, other):
        return 40 if sockets is None or sockets[first] == sockets[other] else 50

    return types.SimpleNamespace(
        NVMLError=_Fault, NVML_TOPOLOGY_SYSTEM=50, nvmlMemory_v2=2, nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(names), nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda i: names[i], nvmlDeviceGetUUID=lambda i: f"GPU-0000000{i}",
        nvmlDeviceGetNvLinkState=state, nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetTopologyCommonAncestor=ancestor,
    )


USABLE = 80 - 870 / 1024


def test_detect(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _driver(["NVIDIA A800 80GB PCIe"] * 4, nvlink=False))
    assert detect() == Inventory(cards=4, card_gib=USABLE, link="pcie", island=4)
    monkeypatch.setitem(sys.modules, "pynvml", _driver([b"NVIDIA A100-SXM4-80GB"] * 8))
    assert detect().link is LinkKind.NVLINK


@pytest.mark.parametrize(
    "sockets, island",
    [("00001111", 4), ("00000000", 8), ("00112233", 2), ("01010101", 1), ("00011111", 1), ("000111", 3)],
)
def test_islands(monkeypatch, sockets, island):
    monkeypatch.setitem(sys.modules, "pynvml", _driver(["A800"] * len(sockets), nvlink=False, sockets=sockets))
    assert detect().island == island


def test_sockets_that_the_driver_does_not_tell(monkeypatch):
    def ancestor(first, other):
        raise _Fault("Not Supported")

    driver = _driver(["A800"] * 8, nvlink=False)
    driver.nvmlDeviceGetTopologyCommonAncestor = ancestor
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert detect().island == 4


@pytest.mark.parametrize("visible, cards", [("0,1,5", 3), ("GPU-00000002, 3", 2), ("7", 1), (None, 8)])
def test_visible_cards(monkeypatch, visible, cards):
    monkeypatch.setitem(sys.modules, "pynvml", _driver(["A800"] * 8, sockets="00001111"))
    assert detect(visible).cards == cards


@pytest.mark.parametrize("visible", ["", "8", "-1", "GPU-9", "GPU-"])
def test_no_visible_card(monkeypatch, visible):
    monkeypatch.setitem(sys.modules, "pynvml", _driver(["A800"] * 8))
    with pytest.raises(AmpereError, match="no NVIDIA cards that may be used"):
        detect(visible)


@pytest.mark.parametrize(
    "driver, words",
    [
        (None, "nvidia-ml-py is not installed"),
        (_driver([], fault=True), "Driver Not Loaded"),
        (_driver([]), "no NVIDIA cards"),
        (_driver(["A100", "A6000"]), "differ: A100, A6000"),
        (_driver(["A100", "A100"], sizes=[40 * 2**30, 80 * 2**30]), "differ"),
    ],
)
def test_detect_refuses(monkeypatch, driver, words):
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with pytest.raises(AmpereError, match=words) as raised:
        detect()
    assert raised.value.hint
