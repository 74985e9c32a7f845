# SPDX-License-Identifier: Apache-2.0
"""Areas 5 and 6: what makes each code fire, and what is near it and must not."""

import json
import shutil
from dataclasses import replace

from tests.doctor.expected import (
    FAIL, OK, ONE_NODE, TWO_NODES, UNKNOWN, WARN, Expected, asking, attributes, both, package, remove, variables,
    write,
)  # fmt: skip
from tests.doctor.machine import GIB, MOUNTS, TCP
from vllm.ampere.checkpoint import INDEX
from vllm.ampere.doctor import peer


def model(spoil=lambda folder: None):
    """A copy of the checkpoint, spoilt, is asked of the doctor."""

    def change(machine):
        folder = machine.site.parent / "model"
        shutil.copytree(machine.checkpoint, folder)
        spoil(folder)
        return {"model": folder}

    return change


def shard(folder):
    return sorted(folder.glob("*.safetensors"))[2]


def shorten(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-100])


def pointer(folder):
    shard(folder).write_text("version https://git-lfs.github.com/spec/v1\n")


def edit_config(**changes):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def other_classes(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["entirelyanotherword"] = len(vocabulary) + 1000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def fewer_layers(folder):
    """One layer's tensors belong to another release."""
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name in index["weight_map"] if name.startswith("layers.0.ffn.experts.0."))
    file = folder / index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))
    content = file.read_bytes()
    file.write_bytes(content.replace(name.encode(), name.replace("experts.0", "experts.9").encode()))


def on(kind: str):
    def change(machine):
        folder = machine.site.parent / "model"
        shutil.copytree(machine.checkpoint, folder)
        machine.write("/proc/mounts", f"{MOUNTS}filer:/weights {folder.resolve()} {kind} rw,hard 0 0\n")
        return {"model": folder}

    return change


CHECKPOINT = [
    Expected("AMP501", FAIL, "there is no such folder", model(shutil.rmtree)),
    Expected("AMP501", FAIL, "config.json is for DeepseekV3ForCausalLM",
             model(edit_config(architectures=["DeepseekV3ForCausalLM"]))),
    Expected("AMP502", FAIL, "shard model-00003-of-00015.safetensors of 15 is missing",
             model(lambda folder: shard(folder).unlink())),
    Expected("AMP502", UNKNOWN, "not reached: the fault in the config comes first", model(shutil.rmtree)),
    Expected("AMP501", OK, "config.json is one", model(shorten)),
    Expected("AMP502", OK, "every shard is there", model(shorten)),
    Expected("AMP503", FAIL, "is truncated: 100 of its", model(shorten)),
    Expected("AMP503", FAIL, "is a Git LFS pointer", model(pointer)),
    Expected("AMP504", UNKNOWN, "the fault in the headers", model(shorten)),
    Expected("AMP504", FAIL, "tensor layers.0.ffn.experts.0.", model(fewer_layers)),
    Expected("AMP505", FAIL, "token classes, config.json says", model(other_classes)),
    Expected("AMP505", FAIL, "has no tokenizer.json", model(lambda folder: (folder / "tokenizer.json").unlink())),
    Expected("AMP506", WARN, "is on nfs4", on("nfs4")),
    Expected("AMP506", WARN, "is on fuse.s3fs", on("fuse.s3fs")),
    Expected("AMP506", OK, "is on xfs", on("xfs")),
]


def cards_of(gib: float, count: int = 8):
    def change(machine):
        machine.each_card(memory_bytes=int(gib * GIB))
        machine.cards = machine.cards[:count]

    return change


def two_nodes(*changes):
    return both(cards_of(39.39), *changes, asking(preset=TWO_NODES))


def interface(name: str):
    return write(f"/sys/class/net/{name}/operstate", "up\n")


def listening(port: int):
    row = f"   2: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23\n"
    return write("/proc/net/tcp", TCP + row)


TOPOLOGY = [
    Expected("AMP601", FAIL, "4 cards of 79.1 GiB, the preset is for 8 of 79.15",
             both(cards_of(79.15, 4), asking(preset=ONE_NODE))),
    Expected("AMP601", FAIL, "8 cards of 39.4 GiB", both(cards_of(39.39), asking(preset=ONE_NODE))),
    Expected("AMP601", FAIL, "2 cards of", variables(preset=ONE_NODE, CUDA_VISIBLE_DEVICES="0,1")),
    Expected("AMP601", OK, "8 cards of 78.5 GiB", both(cards_of(78.5), asking(preset=ONE_NODE))),
    Expected("AMP602", FAIL, "lacks", asking(preset="a100-80g-x4-tp4")),
    Expected("AMP603", WARN, "8 cards of 23.7 GiB: the nearest is", cards_of(23.7)),
    Expected("AMP603", OK, "fits: ", cards_of(63.5)),
    Expected("AMP603", UNKNOWN, "no cards", attributes(cards=[])),
    Expected("AMP604", FAIL, "GLOO_SOCKET_IFNAME=eth1, and the interfaces are docker0, eth0, lo",
             variables(GLOO_SOCKET_IFNAME="eth1")),
    Expected("AMP604", FAIL, "NCCL_SOCKET_IFNAME=docker0 is an interface that other nodes do not reach",
             two_nodes(variables(NCCL_SOCKET_IFNAME="docker0"))),
    Expected("AMP604", FAIL, "GLOO_SOCKET_IFNAME=br-4f5 is",
             two_nodes(interface("br-4f5"), variables(GLOO_SOCKET_IFNAME="br-4f5"))),
    Expected("AMP604", FAIL, "GLOO_SOCKET_IFNAME=eth, and", variables(GLOO_SOCKET_IFNAME="eth")),
    Expected("AMP604", FAIL, "NCCL_SOCKET_IFNAME==eth, and", variables(NCCL_SOCKET_IFNAME="=eth")),
    Expected("AMP604", UNKNOWN, "lists no interface", remove("/sys/class/net")),
    Expected("AMP604", OK, "one node does not mind", variables(NCCL_SOCKET_IFNAME="lo")),
    Expected("AMP604", OK, "NCCL_SOCKET_IFNAME=^docker0,lo", two_nodes(variables(NCCL_SOCKET_IFNAME="^docker0,lo"))),
    Expected("AMP604", OK, "NCCL_SOCKET_IFNAME=eth", two_nodes(variables(NCCL_SOCKET_IFNAME="eth"))),
    Expected("AMP605", FAIL, "stands for 127.0.1.1, which other nodes", two_nodes(attributes(own_address="127.0.1.1"))),
    Expected("AMP605", FAIL, "stands for 198.51.100.1", two_nodes(attributes(own_address="198.51.100.1"))),
    Expected("AMP605", OK, "one node does not mind", attributes(own_address="127.0.1.1")),
    Expected("AMP605", OK, "GLOO_SOCKET_IFNAME says",
             two_nodes(attributes(own_address="127.0.1.1"), variables(GLOO_SOCKET_IFNAME="eth0"))),
    Expected("AMP606", WARN, "NCCL_P2P_DISABLE=1: cards of one node meet through host memory; NCCL_ALGO=Ring",
             variables(NCCL_P2P_DISABLE="1", NCCL_ALGO="Ring")),
    Expected("AMP606", OK, "no setting", variables(NCCL_P2P_DISABLE="0", NCCL_DEBUG="WARN")),
    Expected("AMP607", FAIL, "somebody listens on port 29501", two_nodes(listening(29501))),
    Expected("AMP607", OK, "port 29501 is free", two_nodes(listening(29502))),
    Expected("AMP608", FAIL, "no card is called '8'; CUDA ignores", variables(CUDA_VISIBLE_DEVICES="7,8,0")),
    Expected("AMP608", FAIL, "names a card twice", variables(CUDA_VISIBLE_DEVICES="0,1,1")),
    Expected("AMP608", FAIL, "no card is called ''", variables(CUDA_VISIBLE_DEVICES="")),
    Expected("AMP608", OK, "CUDA_VISIBLE_DEVICES=GPU-3a5f, 0", variables(CUDA_VISIBLE_DEVICES="GPU-3a5f, 0")),
    Expected("AMP609", OK, "14,14,12; layer 28 takes layer 20's latent, candidates from the stage before",
             variables(VLLM_PP_LAYER_PARTITION="14,14,12")),
    Expected("AMP609", FAIL, "0,40 does not deal out 40 layers", variables(VLLM_PP_LAYER_PARTITION="0,40")),
    Expected("AMP609", FAIL, "20,21 does not deal out 40 layers", variables(VLLM_PP_LAYER_PARTITION="20,21")),
    Expected("AMP609", FAIL, "a,b does not deal out 40 layers", variables(VLLM_PP_LAYER_PARTITION="a,b")),
    Expected("AMP609", FAIL, "8,32, the preset cuts 20,20", variables(preset=ONE_NODE, VLLM_PP_LAYER_PARTITION="8,32")),
    Expected("AMP609", OK, "8,12,20", variables(VLLM_PP_LAYER_PARTITION="8,12,20")),
]


def beside(alter=lambda facts: facts, *changes):
    """The other node's report, made of this machine before its changes and altered."""

    def change(machine):
        folder = machine.site.parent / "model"
        shutil.copytree(machine.checkpoint, folder)
        other = alter(peer.facts(machine.case(model=folder)))
        return {"model": folder} | both(*changes)(machine) | {"peer": peer.Report(peer.SCHEMA, other, [])}

    return change


def silent(name: str):
    return beside(lambda facts: replace(facts, **{name: None}))


def another_hash(name: str):
    return beside(lambda facts: replace(facts, **{name: "0" * 64}))


def unpatch(machine):
    (machine.site / "vllm/model.py").write_text("one\ntwo\n")


def swap_tokenizer(machine):
    file = machine.site.parent / "model/tokenizer.json"
    file.write_text(file.read_text() + " ")


PEER = [
    Expected("AMP611", FAIL, "triton: none here, 3.8.0 there", beside(lambda facts: facts, package("triton", None))),
    Expected("AMP611", FAIL, "torch: 2.15.0 here, 2.14.0+cu130 there", beside(lambda f: f, package("torch", "2.15.0"))),
    Expected("AMP612", WARN, "driver 580.65.06 here, 575.1 there",
             beside(lambda facts: replace(facts, driver="575.1"))),
    Expected("AMP612", UNKNOWN, "the other node's report does not say", silent("driver")),
    Expected("AMP613", FAIL, "NVIDIA A800 80GB PCIe 79.1 GiB: 7 here, 8 there",
             beside(lambda facts: facts, cards_of(79.15, 7))),
    Expected("AMP613", FAIL, "NVIDIA A800 80GB PCIe 39.4 GiB: 8 here, none there",
             beside(lambda f: f, cards_of(39.39))),
    Expected("AMP614", FAIL, "the patched files differ",
             beside(lambda facts: facts, unpatch)),
    Expected("AMP614", UNKNOWN, "does not say", silent("patches")),
    Expected("AMP615", FAIL, "the checkpoints differ", another_hash("checkpoint")),
    Expected("AMP615", FAIL, "the checkpoints differ", beside(lambda facts: facts, swap_tokenizer)),
    Expected("AMP615", UNKNOWN, "no --model is given here", beside(lambda facts: facts, asking(model=None))),
    Expected("AMP616", WARN, "NCCL_DEBUG: INFO here, none there",
             beside(lambda facts: facts, variables(NCCL_DEBUG="INFO"))),
    Expected("AMP616", OK, "the same variables", beside(lambda facts: facts, variables(VLLM_HOST_IP="192.0.2.7"))),
]
