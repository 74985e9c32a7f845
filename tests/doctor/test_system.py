# SPDX-License-Identifier: Apache-2.0
"""How the machine is read: files, limits, mounts, cards; and that nothing read can take the doctor down."""

import os
import socket
import sys
import types
from importlib.util import spec_from_file_location

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doctor.expected import ONE_NODE
from tests.doctor.machine import MOUNTS
from vllm.ampere.doctor import nvml, run_checks
from vllm.ampere.doctor.findings import Status
from vllm.ampere.doctor.run import CHECKS
from vllm.ampere.doctor.system import Mount, System


def test_the_longest_and_last_mount_wins(machine):
    machine.write("/proc/mounts", MOUNTS + "filer:/a /caches/my\\040models nfs4 rw 0 0\ntmpfs /caches tmpfs rw 0 0\n")
    system = machine.system()
    assert system.mount_of("/caches/tilelang/x").kind == "tmpfs"
    assert system.mount_of("/caches/my models/shard") == Mount("/caches/my models", "nfs4", ("rw",))
    assert system.mount_of("/cachesnot").kind == "overlay"


def test_limits_of_version_2_groups_above_count(machine):
    machine.write("/proc/self/cgroup", "0::/pods/one/two\n")
    machine.write("/sys/fs/cgroup/pods/one/two/memory.max", "max\n")
    machine.write("/sys/fs/cgroup/pods/one/memory.max", "2000\n")
    machine.write("/sys/fs/cgroup/pods/memory.max", "1000\n")
    assert machine.system().memory_limit_bytes == 1000


def test_packages_are_read_from_metadata_and_the_first_wins(machine, tmp_path):
    machine.package("Some_Package", "1.0")
    other = tmp_path / "other"
    (other / "some.package-2.0.dist-info").mkdir(parents=True)
    (other / "some.package-2.0.dist-info/METADATA").write_text("Name: some.package\nVersion: 2.0\n")
    machine.search_path = [machine.site, other]
    assert machine.system().version("some-package") == "1.0"
    machine.search_path = [other, machine.site]
    assert machine.system().version("some-package") == "2.0"
    assert machine.system().version("nothing") is None


def test_an_editable_vllm_is_found_by_its_hook(machine, monkeypatch):
    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "vllm":
                return spec_from_file_location("vllm", machine.site / "vllm/__init__.py")

    monkeypatch.setattr(sys, "meta_path", [Hook])
    assert System(search_path=[]).tree == machine.site
    monkeypatch.setattr(sys, "meta_path", [])
    assert System(search_path=[]).tree is None


def test_this_machine():
    """What the kernel says here, by another way."""
    system = System()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert system.memory["MemTotal"] == pytest.approx(pages, rel=0.01)
    assert system.addresses["lo"] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in System().listening


class Fault(Exception):
    """The played driver's error."""


def played(monkeypatch, missing: tuple[str, ...] = (), **answers):
    """A module pynvml with two cards, the second of which answers nothing that is optional."""
    module = types.ModuleType("pynvml")
    module.NVMLError = Fault

    def of_card(value):
        def ask(handle, *_):
            if handle == 1:
                raise Fault("Not Supported")
            return value

        return ask

    always = {
        "nvmlDeviceGetName": b"NVIDIA A100-SXM4-80GB", "nvmlDeviceGetCudaComputeCapability": (8, 0),
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=85 << 30, used=1 << 30),
        "nvmlDeviceGetUUID": "GPU-1", "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="00000000:3B:00.0"),
    }  # fmt: skip
    optional = {
        "nvmlDeviceGetNvLinkState": 1, "nvmlDeviceGetMigMode": [1, 1], "nvmlDeviceGetTotalEccErrors": 4,
        "nvmlDeviceGetRemappedRows": (0, 1, 1, 0),
        "nvmlDeviceGetCurrPcieLinkWidth": 8, "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": 3, "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetPerformanceState": 0, "nvmlDeviceGetPersistenceMode": 0,
        "nvmlDeviceGetPowerManagementLimit": 250000, "nvmlDeviceGetPowerManagementDefaultLimit": 400000,
    }  # fmt: skip
    functions = {name: (lambda handle, value=value: value) for name, value in always.items()}
    functions |= {name: of_card(value) for name, value in optional.items() if name not in missing}
    functions |= {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06", "nvmlDeviceGetP2PStatus": lambda *_: 2,
    }  # fmt: skip
    for name, function in (functions | answers).items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_cards_of_the_driver(monkeypatch):
    played(monkeypatch)
    driver = nvml.read()
    assert (driver.version, driver.cuda, driver.strangers) == ("580.65.06", (13, 1), ((0, 1),))
    first, second = driver.cards
    assert first == nvml.Card(
        0, "NVIDIA A100-SXM4-80GB", (8, 0), 85 << 30, 1 << 30, "GPU-1", "0000:3b:00.0", True, 4, True, False,
        8, 16, 3, 4, 0, False, 250.0, 400.0, 12, 12,
    )  # fmt: skip
    assert second == nvml.Card(1, first.name, (8, 0), first.memory_bytes, first.used_bytes, "GPU-1", first.bus)


def test_an_old_package_lacks_functions(monkeypatch):
    played(monkeypatch, missing=("nvmlDeviceGetRemappedRows", "nvmlDeviceGetMigMode"))
    assert nvml.read().cards[0].remap_pending is None and nvml.read().cards[0].partitioned is None


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_does_not_answer_is_unknown(monkeypatch, broken):
    def fail():
        raise Fault("Driver/library version mismatch")

    played(monkeypatch, **{broken: fail})
    with pytest.raises(nvml.NoAnswer, match="version mismatch"):
        nvml.read()


def test_a_check_that_raises_is_reported(machine, monkeypatch):
    def broken(case):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setitem(CHECKS, "AMP101", broken)
    found = {finding.code: finding for finding in run_checks(machine.system())}
    assert found["AMP101"].status is Status.UNKNOWN
    assert found["AMP101"].seen == "the check failed: ZeroDivisionError: two lines"
    assert found["AMP102"].status is Status.OK


FILES = (
    "/proc/mounts", "/proc/meminfo", "/proc/self/cgroup", "/proc/self/limits", "/proc/net/tcp",
    "/sys/fs/cgroup/memory.max", "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/node/node0/meminfo", "/proc/driver/nvidia/version",
    "/sys/bus/pci/devices/0000:00:00.0/numa_node", "/usr/local/cuda/version.json",
)  # fmt: skip
FRAGMENTS = (
    "", "0::/\n", "[", "{}", "a b\n", "1:memory:/x\n", "MemTotal: -1 kB\n", "Max locked memory  x\n", "0: 00:zz 0 0A\n",
)  # fmt: skip
GARBAGE = st.one_of(st.binary(max_size=60), st.sampled_from(FRAGMENTS).map(str.encode))


# Those that plan take most of the time, and read nothing of the machine but its cards.
QUICK = sorted(CHECKS.keys() - {"AMP602", "AMP603"})


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FILES), GARBAGE, min_size=1))
def test_garbled_files_never_crash(machine, garbled):
    before = {path: (machine.root / path.lstrip("/")).read_bytes() for path in garbled}
    try:
        for path, content in garbled.items():
            (machine.root / path.lstrip("/")).write_bytes(content)
        found = [finding for code in QUICK if (finding := machine.check(code))]
    finally:
        for path, content in before.items():
            (machine.root / path.lstrip("/")).write_bytes(content)
    assert {finding.code[:4] for finding in found} == {"AMP1", "AMP2", "AMP3", "AMP4", "AMP6"}
    assert all(finding.seen and "\n" not in finding.seen for finding in found)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(
    st.sampled_from(["CUDA_VISIBLE_DEVICES", "VLLM_PP_LAYER_PARTITION", "GLOO_SOCKET_IFNAME",
                     "NCCL_SOCKET_IFNAME", "HOME", "PATH", "CUDA_HOME", "TRITON_CACHE_DIR", "VLLM_PLUGINS"]),
    st.text(st.characters(exclude_characters="\0"), max_size=20),
))
def test_any_variable_never_crashes(machine, values):
    kept = dict(machine.variables)
    machine.variables.update(values)
    try:
        found = [finding for code in QUICK if (finding := machine.check(code))]
    finally:
        machine.variables = kept
    assert not [finding for finding in found if "the check failed" in finding.seen]


@pytest.mark.parametrize("preset, model", [(None, None), (ONE_NODE, None), (None, "/nowhere")])
def test_every_check_has_an_outcome_here(preset, model):
    """On the machine that the test runs on, whatever it has."""
    found = run_checks(System(), preset=preset, model=model)
    assert not [finding for finding in found if "the check failed" in finding.seen]
    assert len(found) >= 35 and len({finding.code for finding in found}) == len(found)
