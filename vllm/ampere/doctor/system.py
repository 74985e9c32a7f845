# SPDX-License-Identifier: Apache-2.0
"""The machine as the checks see it: files below a root, what Python can find, the driver's cards, the network.

Nearly all of it is files, so that a captured tree stands for a machine.
"""

import fcntl
import importlib.metadata
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Iterator, Mapping, Sequence

from ..errors import PatchError
from ..patching import tree
from . import nvml
from .findings import Unknown

# Above it a limit of version 1 control groups means none.
_UNLIMITED_BYTES = 1 << 60
# Filesystems that containers put together from an image's layers.
LAYERED = ("overlay", "aufs", "fuse-overlayfs")
_SIOCGIFADDR = 0x8915
_LISTENING = "0A"


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    folder: str
    kind: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """A filesystem's size and what is free for this user, bytes."""

    total_bytes: int
    free_bytes: int


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path("/")


def _unescaped(word: str) -> str:
    """A word of /proc/mounts, where a blank is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word)


@dataclass
class System:
    """A machine.

    Args:
        root: below it lie /proc, /sys, /dev and all that is read.
        variables: environment variables.
        search_path: where Python looks for packages.
        working_folder: the current folder.

    Every method and property raises Unknown where the machine does not say. A property that is assigned to keeps
    what it was given.
    """

    root: Path = Path("/")
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search_path: Sequence[str] = field(default_factory=lambda: list(sys.path))
    working_folder: Path = field(default_factory=_working_folder)

    def at(self, path: str | Path) -> Path:
        """Where an absolute path of the machine lies."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str | Path) -> str:
        """The text of a file."""
        try:
            return self.at(path).read_text(errors="replace")
        except OSError as error:
            raise Unknown(f"cannot read {path}: {error.strerror}") from None

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; none if it does not exist."""
        try:
            return sorted(os.listdir(self.at(folder)))
        except OSError:
            return []

    def space(self, folder: str | Path) -> Space:
        """Of the filesystem that holds a folder."""
        try:
            found = os.statvfs(self.at(folder))
        except OSError as error:
            raise Unknown(f"cannot look at {folder}: {error.strerror}") from None
        return Space(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)

    def writable(self, folder: str | Path) -> bool:
        """This user may make files in a folder."""
        return os.access(self.at(folder), os.W_OK | os.X_OK)

    @cached_property
    def mounts(self) -> list[Mount]:
        """Mounted filesystems; a later one hides an earlier one of the same folder."""
        lines = [line.split() for line in self.read("/proc/mounts").splitlines()]
        return [Mount(_unescaped(line[1]), line[2], tuple(line[3].split(","))) for line in lines if len(line) >= 4]

    def mount_of(self, path: str | Path) -> Mount:
        """The filesystem that a path is on."""
        above = {str(path), *map(str, PurePosixPath(path).parents)}
        found = [mount for mount in self.mounts if mount.folder in above]
        if not found:
            raise Unknown(f"/proc/mounts names no filesystem of {path}")
        return max(reversed(found), key=lambda mount: len(mount.folder))

    @cached_property
    def memory(self) -> dict[str, int]:
        """The lines of /proc/meminfo that are sizes, in bytes."""
        found = re.findall(r"^(\S+):\s+(\d+) kB$", self.read("/proc/meminfo"), re.MULTILINE)
        return {name: int(kib) * 1024 for name, kib in found}

    @cached_property
    def memory_limit_bytes(self) -> int | None:
        """The least memory limit of this process's control group and those above it; None is no limit."""
        found = []
        for line in self.read("/proc/self/cgroup").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                base, name = "/sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                base, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
                file = self.at(f"{base}{folder}/{name}")
                if file.is_file() and (text := file.read_text().strip()).isdigit():
                    found.append(int(text))
        return min((limit for limit in found if limit < _UNLIMITED_BYTES), default=None)

    def limit(self, name: str) -> int | None:
        """A soft limit of this process, as "Max locked memory", bytes or a count; None is no limit."""
        line = re.search(rf"^{name}\s+(\S+)", self.read("/proc/self/limits"), re.MULTILINE)
        if not line:
            raise Unknown(f"/proc/self/limits has no {name!r}")
        return None if line[1] == "unlimited" else int(line[1])

    @cached_property
    def in_container(self) -> bool:
        """This is a container: its engine left a mark, or / is made of layers."""
        marked = self.at("/.dockerenv").exists() or self.at("/run/.containerenv").exists()
        return marked or self.mount_of("/").kind in LAYERED

    @cached_property
    def packages(self) -> dict[str, importlib.metadata.Distribution]:
        """Installed distributions by normalised name; the first on the search path wins."""
        found: dict[str, importlib.metadata.Distribution] = {}
        for distribution in importlib.metadata.distributions(path=list(self.search_path)):
            if name := distribution.metadata["Name"]:
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
        return found

    def version(self, package: str) -> str | None:
        """The version of an installed distribution; None if it is not installed."""
        found = self.packages.get(package)
        return found.version if found else None

    def packaged(self, package: str, path: str) -> str:
        """The text of a file beside a distribution's metadata, as torch/version.py."""
        try:
            return Path(self.packages[package].locate_file(path)).read_text()
        except (KeyError, OSError):
            raise Unknown(f"{package} has no {path}") from None

    def trees(self) -> Iterator[Path]:
        """Folders of the search path that hold a folder `vllm`, in order."""
        seen = set()
        for entry in self.search_path:
            folder = (self.working_folder / entry).absolute()
            if (folder / "vllm").is_dir() and folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder

    @cached_property
    def tree(self) -> Path | None:
        """The folder whose vLLM a server of this Python runs; None if there is none."""
        whole = (folder for folder in self.trees() if (folder / "vllm" / "__init__.py").is_file())
        return next(whole, None) or self.hooked_tree()

    def hooked_tree(self) -> Path | None:
        """The folder that an import hook of this Python names, as those of editable installations do."""
        try:
            return tree.locate(None)
        except PatchError:
            return None

    @cached_property
    def driver(self) -> nvml.Driver:
        """The NVIDIA driver and its cards."""
        try:
            return nvml.read()
        except Unknown:
            if self.driver_is_loaded:
                raise
            raise Unknown("no NVIDIA driver is loaded") from None

    @property
    def driver_is_loaded(self) -> bool:
        """The driver's files are there; /dev/dxg is how Windows lends its own to Linux."""
        return any(self.at(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))

    @cached_property
    def addresses(self) -> dict[str, str]:
        """IPv4 address of each network interface that has one."""
        found = {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for name in self.names("/sys/class/net"):
                try:
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue
                found[name] = socket.inet_ntoa(answer[20:24])
        return found

    @cached_property
    def own_address(self) -> str:
        """The IPv4 address that this machine's name stands for, which gloo listens on."""
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise Unknown(f"this machine's name has no address: {error.strerror}") from None

    @cached_property
    def listening(self) -> set[int]:
        """TCP ports that somebody listens on."""
        rows = [line.split() for name in ("tcp", "tcp6") for line in self._lines(f"/proc/net/{name}")]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTENING}

    def _lines(self, path: str) -> list[str]:
        try:
            return self.read(path).splitlines()
        except Unknown:
            return []
