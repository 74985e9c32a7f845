# SPDX-License-Identifier: Apache-2.0
"""A machine made of files: eight A800 of 80 GB in a container that is started as it should be.

The texts have the form in which the kernel, the driver and the toolkit write them, shortened. A test changes one thing.
"""

import json
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from tests.cli.conftest import DIFF, HASHES, HEADER
from vllm.ampere.doctor.case import Case
from vllm.ampere.doctor.findings import Finding, Unknown
from vllm.ampere.doctor.nvml import Card, Driver
from vllm.ampere.doctor.run import run_check
from vllm.ampere.doctor.system import Space, System
from vllm.ampere.patching.tree import OVERLAY

GIB = 2**30
CARD = Card(
    index=0, name="NVIDIA A800 80GB PCIe", capability=(8, 0), memory_bytes=int(79.15 * GIB), used_bytes=480 * 2**20,
    partitioned=False, uncorrected_errors=0, remap_pending=False, remap_failed=False, pcie_width=16, pcie_width_max=16,
    pcie_generation=1, pcie_generation_max=4, performance_state=8, persistent=True, power_limit_w=300.0,
    power_default_w=300.0, links=12, active_links=0,
)  # fmt: skip
MOUNTS = """\
overlay / overlay rw,relatime,lowerdir=/layers/1,upperdir=/layers/2 0 0
proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0
tmpfs /dev tmpfs rw,nosuid,size=65536k,mode=755 0 0
tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0
/dev/nvme0n1p2 /caches ext4 rw,relatime 0 0
/dev/nvme1n1 /models xfs rw,relatime,attr2 0 0
"""
MEMINFO = """\
MemTotal:       1056451476 kB
MemFree:        801920320 kB
MemAvailable:   1003083320 kB
SwapTotal:       8388604 kB
SwapFree:        8388604 kB
HugePages_Total:       0
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:15:59 UTC 2025\nGCC version: gcc\n"
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 21 1 0 100 0 0 10 0
   1: 0100007F:733D 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 22 1 0 100 0 0 10 0
"""
TOOLKIT = {name: {"name": name, "version": "13.0.88"} for name in ("cuda_nvcc", "cuda_cccl", "cuda_cudart")}
ENTRY_POINTS = "[vllm.general_plugins]\nampere = vllm.ampere.integration.register:register\n"


class PlayedSystem(System):
    """Filesystems have the sizes and rights that are given, and no import hook of the test's Python counts."""

    spaces: dict[str, Space]
    sealed: set[str]
    silence: Unknown

    def writable(self, folder) -> bool:
        return str(folder) not in self.sealed

    def hooked_tree(self) -> None:
        return None

    @cached_property
    def driver(self) -> Driver:
        """Where a test gives none: as without the package, or with one whose driver fails."""
        if self.driver_is_loaded:
            raise self.silence
        raise Unknown("no NVIDIA driver is loaded")

    def space(self, folder) -> Space:
        return self.spaces.get(str(folder), Space(2000 * GIB, 900 * GIB))


class Machine:
    """The machine below a folder; every attribute may be changed before `system`.

    Attributes:
        site: Python's package folder.
        variables, cards, cuda, driver, strangers, addresses, own_address, spaces: as `System` has them.
        sealed: folders that cannot be written.
        silence: why there is no answer, with an empty `driver`.
    """

    def __init__(self, folder: Path):
        self.root, self.site, self.series = folder / "root", folder / "site", folder / "series"
        self.variables = {
            "PATH": "/usr/local/cuda/bin:/usr/bin", "HOME": "/caches", "TILELANG_CACHE_DIR": "/caches/tilelang",
        }  # fmt: skip
        self.cards = [replace(CARD, index=i, uuid=f"GPU-{i}a5f", bus=f"0000:{i:02x}:00.0") for i in range(8)]
        self.cuda, self.driver, self.strangers = (13, 0), "580.65.06", ()
        self.addresses = {"lo": "127.0.0.1", "eth0": "192.0.2.7", "docker0": "198.51.100.1"}
        self.own_address = "192.0.2.7"
        self.spaces = {"/dev/shm": Space(504 * GIB, 503 * GIB)}
        self.sealed: set[str] = set()
        self.silence = Unknown("the package nvidia-ml-py is not installed, so the driver cannot be asked")
        self.search_path = [self.site]
        self.working_folder = folder
        self._files()
        self._packages()

    def write(self, path: str, text: str) -> None:
        """A file of the machine."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def program(self, path: str) -> None:
        self.write(path, "")
        (self.root / path.lstrip("/")).chmod(0o755)

    def remove(self, path: str) -> None:
        there = self.root / path.lstrip("/")
        shutil.rmtree(there) if there.is_dir() else there.unlink()

    def package(self, name: str, version: str | None, **files: str) -> None:
        """Install a distribution's metadata, or take it away."""
        for old in self.site.glob(f"{name}-*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        if version is not None:
            folder = self.site / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            for file, text in files.items():
                (folder / f"{file}.txt").write_text(text)

    def each_card(self, **changes) -> None:
        self.cards = [replace(card, **changes) for card in self.cards]

    def one_card(self, index: int, **changes) -> None:
        self.cards[index] = replace(self.cards[index], **changes)

    def system(self) -> System:
        """What the doctor sees; with no `driver`, `silence` is the reason."""
        system = PlayedSystem(self.root, self.variables, [str(path) for path in self.search_path], self.working_folder)
        system.spaces, system.sealed, system.silence = self.spaces, self.sealed, self.silence
        if self.driver:
            system.driver = Driver(self.driver, self.cuda, tuple(self.cards), tuple(self.strangers))
        system.addresses, system.own_address = self.addresses, self.own_address
        return system

    def case(self, preset: str | None = None, model: Path | None = None, peer=None) -> Case:
        return Case.of(self.system(), preset, model, peer)

    def check(self, code: str, **asked) -> Finding | None:
        return run_check(code, self.case(**asked))

    def _files(self) -> None:
        self.write("/proc/mounts", MOUNTS)
        self.write("/proc/meminfo", MEMINFO)
        self.write("/proc/self/cgroup", "0::/\n")
        self.write("/sys/fs/cgroup/memory.max", "max\n")
        self.write("/proc/self/limits", LIMITS)
        self.write("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        for node in range(2):
            text = f"Node {node} MemTotal:       528225738 kB\nNode {node} MemFree: 400960160 kB\n"
            self.write(f"/sys/devices/system/node/node{node}/meminfo", text)
        for card in self.cards:
            self.write(f"/dev/nvidia{card.index}", "")
            self.write(f"/sys/bus/pci/devices/{card.bus}/numa_node", f"{card.index // 4}\n")
        self.write("/dev/nvidiactl", "")
        self.write("/proc/driver/nvidia/version", DRIVER)
        for name in self.addresses:
            self.write(f"/sys/class/net/{name}/operstate", "up\n")
        self.write("/proc/net/tcp", TCP)
        self.write("/usr/local/cuda/version.json", json.dumps(TOOLKIT))
        self.program("/usr/local/cuda/bin/nvcc")
        self.program("/usr/bin/gcc")
        self.write("/caches/tilelang/stamp", "")

    def _packages(self) -> None:
        self.package("vllm", "0.33.0")
        self.package("torch", "2.14.0+cu130")
        (self.site / "torch").mkdir()
        (self.site / "torch/version.py").write_text("__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\n")
        for name, version in (("triton", "3.8.0"), ("tilelang", "0.1.12"), ("transformers", "5.20.2")):
            self.package(name, version)
        self.package("vllm_ampere", "0.1.0", entry_points=ENTRY_POINTS)
        (self.site / "vllm").mkdir()
        (self.site / "vllm/__init__.py").write_text("")
        (self.site / "vllm/model.py").write_text("one\nhook\ntwo\n")
        (self.site / "vllm/ampere").symlink_to(OVERLAY)
        self.series.mkdir()
        (self.series / "series").write_text("0010-model-hook.patch\n")
        (self.series / "0010-model-hook.patch").write_bytes(HEADER + DIFF)
        (self.series / "hashes.json").write_text(HASHES)
