# SPDX-License-Identifier: Apache-2.0
"""Areas 1 and 2: what makes each code fire, and what is near it and must not."""

from tests.doctor.expected import (
    FAIL, OK, ONE_NODE, TWO_NODES, UNKNOWN, WARN, Expected, asking, attributes, both, every, one, remove, space,
    variables, write,
)  # fmt: skip
from tests.doctor.machine import GIB, LIMITS, MEMINFO, MOUNTS
from vllm.ampere.doctor.nvml import NoAnswer

MIB = 2**20
NODE = "/sys/devices/system/node/node1"


def meminfo(**kib: int):
    lines = [line.split() for line in MEMINFO.splitlines()]
    text = "".join(f"{name} {kib.get(name.rstrip(':'), value)} {' '.join(unit)}\n" for name, value, *unit in lines)
    return write("/proc/meminfo", text)


def group(file: str, limit: int, cgroup: str = "0::/\n"):
    return both(write("/proc/self/cgroup", cgroup), write(f"/sys/fs/cgroup/{file}", f"{limit}\n"))


def locked(limit: str):
    return write("/proc/self/limits", LIMITS.replace("unlimited", limit, 1))


HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
VERSION_1 = "11:memory:/docker/4f5\n10:cpu,cpuacct:/docker/4f5\n0::/\n"

HOST = [
    Expected("AMP101", FAIL, "64 MiB of 64 MiB are free in /dev/shm", space("/dev/shm", 64 * MIB, 64 * MIB)),
    Expected("AMP101", FAIL, "205 MiB of 16.0 GiB", space("/dev/shm", 16 * GIB, 205 * MIB)),
    Expected("AMP101", OK, "15.0 GiB of 16.0 GiB", space("/dev/shm", 16 * GIB, 15 * GIB)),
    Expected("AMP102", FAIL, "of 125.9 GiB are available, the engram tables take 188.8 GiB (264.0 GiB without use_thp)",
             meminfo(MemTotal=132000000, MemAvailable=131000000)),
    Expected("AMP102", WARN, "right on a node that holds neither layer 1 nor 14",
             both(meminfo(MemTotal=132000000, MemAvailable=131000000), asking(preset=TWO_NODES))),
    Expected("AMP102", WARN, "95.4 GiB of 1007.5 GiB are available", meminfo(MemAvailable=100000000)),
    Expected("AMP102", OK, "the engram tables take 188.8 GiB", asking(preset=TWO_NODES)),
    Expected("AMP102", UNKNOWN, "does not say", write("/proc/meminfo", "MemTotal: lots\n")),
    Expected("AMP103", FAIL, "may use 128.0 GiB, the engram tables take 188.8 GiB", group("memory.max", 128 * GIB)),
    Expected("AMP103", WARN, "right on a node that holds neither", both(group("memory.max", 128 * GIB), asking(preset=TWO_NODES))),
    Expected("AMP103", WARN, "264.0 GiB without use_thp", group("memory.max", 200 * GIB)),
    Expected("AMP103", OK, "may use 300.0 GiB", group("memory.max", 300 * GIB)),
    Expected("AMP103", FAIL, "may use 96.0 GiB", group("pods/memory.max", 96 * GIB, "0::/pods/a/b\n")),
    Expected("AMP103", FAIL, "may use 64.0 GiB", group("memory/docker/4f5/memory.limit_in_bytes", 64 * GIB, VERSION_1)),
    # The group's path is the host's, the container sees its own group at the top.
    Expected("AMP103", FAIL, "may use 32.0 GiB", group("memory/memory.limit_in_bytes", 32 * GIB, VERSION_1)),
    Expected("AMP103", OK, "no memory limit", group("memory/memory.limit_in_bytes", 9223372036854771712, VERSION_1)),
    Expected("AMP104", FAIL, "8 MiB may be locked", both(locked("8388608"), asking(preset=TWO_NODES))),
    Expected("AMP104", OK, "one node does not need", both(locked("8388608"), asking(preset=ONE_NODE))),
    Expected("AMP104", OK, "unlimited", asking(preset=TWO_NODES)),
    Expected("AMP104", UNKNOWN, "/proc/self/limits", remove("/proc/self/limits")),
    Expected("AMP105", WARN, "never; with ordinary pages a table is pinned as a power of two, 264.0 GiB in all",
             write(HUGE, "always madvise [never]\n")),
    Expected("AMP105", OK, "always", write(HUGE, "[always] madvise never\n")),
    Expected("AMP105", UNKNOWN, "names no choice", write(HUGE, "\n")),
    Expected("AMP106", WARN, "62.5 GiB to 503.8 GiB", write(f"{NODE}/meminfo", "Node 1 MemTotal:  65536000 kB\n")),
    Expected("AMP106", WARN, "memory node 1, which has no memory",
             write(f"{NODE}/meminfo", "Node 1 MemTotal:  0 kB\n")),
    Expected("AMP106", OK, "one memory node", remove(NODE)),
    Expected("AMP107", WARN, "7.0 GiB are swapped out", meminfo(SwapFree=1024000)),
    Expected("AMP107", OK, "0 MiB", meminfo(SwapTotal=0, SwapFree=0)),
    Expected("AMP108", FAIL, "512 MiB are free for the cache /caches/tilelang",
             space("/caches/tilelang", GIB, 512 * MIB)),
    Expected("AMP108", WARN, "4.0 GiB are free", space("/caches", 100 * GIB, 4 * GIB)),
    Expected("AMP109", FAIL, "/caches cannot be written, so /caches/.triton/cache cannot",
             attributes(sealed={"/caches"})),
    Expected("AMP109", FAIL, "/caches/.triton/cache is on a filesystem mounted noexec",
             write("/proc/mounts", MOUNTS.replace("/caches ext4 rw", "/caches ext4 rw,noexec"))),
    Expected("AMP109", OK, "/dev/shm/kernels, /caches/tilelang", variables(TRITON_CACHE_DIR="/dev/shm/kernels")),
    Expected("AMP110", WARN, "lost with this container: /root/.triton/cache, /root/.cache/vllm",
             variables(HOME="/root")),
    Expected("AMP110", WARN, "lost with this container: /dev/shm/k", variables(TRITON_CACHE_DIR="/dev/shm/k")),
]


def no_driver(machine):
    machine.driver = ""
    for path in ("/proc/driver", "/dev/nvidiactl", *(f"/dev/nvidia{index}" for index in range(8))):
        machine.remove(path)


def without_devices(machine):
    machine.driver = ""
    for index in range(8):
        machine.remove(f"/dev/nvidia{index}")


def a6000(index: int):
    return one(index, name="NVIDIA RTX A6000", capability=(8, 6), memory_bytes=int(47.99 * GIB))


GPU = [
    Expected("AMP201", FAIL, "no NVIDIA driver is loaded", no_driver),
    Expected("AMP201", FAIL, "the NVIDIA driver is loaded, but there is no /dev/nvidia0", without_devices),
    Expected("AMP201", FAIL, "gives up: GPU is lost",
             attributes(driver="", silence=NoAnswer("the NVIDIA driver gives up: GPU is lost"))),
    Expected("AMP204", UNKNOWN, "GPU is lost", attributes(driver="", silence=NoAnswer("gives up: GPU is lost"))),
    Expected("AMP201", FAIL, "the driver lists no card", attributes(cards=[])),
    Expected("AMP201", OK, "CUDA_VISIBLE_DEVICES hides 6", variables(CUDA_VISIBLE_DEVICES="0,3")),
    Expected("AMP201", UNKNOWN, "nvidia-ml-py", attributes(driver="")),
    Expected("AMP202", FAIL, "compute capability 7.0 cannot run", every(capability=(7, 0))),
    Expected("AMP202", FAIL, "compute capability 8.7 cannot run", every(capability=(8, 7))),
    Expected("AMP202", WARN, "8.9 is not tuned for", every(capability=(8, 9))),
    Expected("AMP202", OK, "compute capability 8.6", every(capability=(8, 6))),
    Expected("AMP202", OK, "newer than Ampere", every(capability=(9, 0))),
    Expected("AMP202", UNKNOWN, "no NVIDIA driver is loaded", no_driver),
    Expected("AMP203", FAIL, "the cards differ: NVIDIA A800 80GB PCIe, NVIDIA RTX A6000, 48.0 to 79.1 GiB", a6000(5)),
    Expected("AMP203", FAIL, "39.4 to 79.1 GiB", one(7, memory_bytes=int(39.39 * GIB))),
    Expected("AMP203", WARN, "different names: NVIDIA A100 80GB PCIe, NVIDIA A800",
             one(1, name="NVIDIA A100 80GB PCIe")),
    Expected("AMP203", OK, "5x NVIDIA A800", both(a6000(5), variables(CUDA_VISIBLE_DEVICES="0,1,2,3,4"))),
    Expected("AMP204", FAIL, "card 3 has 20.0 of 79.1 GiB in use; the server asks for 92%",
             one(3, used_bytes=20 * GIB)),
    Expected("AMP204", WARN, "card 3 has 4.0 of 79.1 GiB in use", one(3, used_bytes=4 * GIB)),
    Expected("AMP205", FAIL, "card 2: a broken row", one(2, remap_failed=True)),
    Expected("AMP205", WARN, "card 2: a row of memory waits", one(2, remap_pending=True)),
    Expected("AMP205", WARN, "cards 0, 1, 2, 3, 4, 5, 6, 7: uncorrected", every(uncorrected_errors=3)),
    Expected("AMP205", UNKNOWN, "counts no memory errors", every(uncorrected_errors=None)),
    Expected("AMP206", FAIL, "card 0: MIG is on", one(0, partitioned=True)),
    Expected("AMP206", OK, "no card is partitioned", every(partitioned=None)),
    Expected("AMP207", WARN, "card 6: PCIe x8 of x16", one(6, pcie_width=8)),
    Expected("AMP207", WARN, "card 6: PCIe generation 1 of 4", one(6, performance_state=0)),
    Expected("AMP207", OK, "PCIe x16", one(6, performance_state=0, pcie_generation=4)),
    Expected("AMP207", UNKNOWN, "does not say", every(pcie_width=None)),
    Expected("AMP208", WARN, "2 pairs of cards cannot read each other's memory, the first is (0, 4)",
             attributes(strangers=((0, 4), (0, 5)))),
    Expected("AMP208", OK, "all cards can",
             both(attributes(strangers=((0, 4),)), variables(CUDA_VISIBLE_DEVICES="0,1"))),
    Expected("AMP209", WARN, "card 4: 6 NVLinks are up, 8 on others",
             both(every(active_links=8), one(4, active_links=6))),
    Expected("AMP209", OK, "8 NVLinks", every(active_links=8)),
    Expected("AMP210", WARN, "card 1: persistence mode is off", one(1, persistent=False)),
    Expected("AMP210", UNKNOWN, "does not say", every(persistent=None)),
    Expected("AMP211", WARN, "card 7: 250 W of 300 W are allowed", one(7, power_limit_w=250.0)),
    Expected("AMP211", OK, "400 W", every(power_limit_w=400.0, power_default_w=300.0)),
    Expected("AMP211", UNKNOWN, "does not say", every(power_limit_w=None)),
]
