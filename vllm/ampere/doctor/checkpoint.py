# SPDX-License-Identifier: Apache-2.0
"""Area 5: the checkpoint, from its headers alone."""

import os
from typing import Callable

from ..checkpoint import PARTS
from ..errors import CheckpointError
from .case import Case
from .findings import Outcome, Unknown, fail, ok, warn

# Filesystems behind a network.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "glusterfs", "beegfs", "gpfs", "afs")


def _part(part: str, well: str) -> Callable[[Case], Outcome | None]:
    """The check of one part, in the order in which they are read: what follows the first fault is not known."""

    def check(case: Case) -> Outcome | None:
        if case.model is None:
            return None
        found = case.checkpoint
        if not isinstance(found, CheckpointError) or PARTS.index(part) < PARTS.index(found.part):
            return ok(well)
        if found.part == part:
            return fail(str(found), found.hint)
        raise Unknown(f"not reached: the fault in the {found.part} comes first")

    return check


def _tokenizer(case: Case) -> Outcome | None:
    outcome = _part("tokenizer", "the tokenizer has the engram's classes")(case)
    known = outcome is not None and not isinstance(case.checkpoint, CheckpointError)
    if known and case.checkpoint.spec.engram_layer_ids and not case.checkpoint.classes_checked:
        raise Unknown("the package tokenizers is not installed, so the tokenizer's classes were not counted")
    return outcome


def _local(case: Case) -> Outcome | None:
    if case.model is None:
        return None
    path = os.path.realpath(case.system.working_folder / case.model)
    mount = case.system.mount_of(path)
    seen = f"{path} is on {mount.kind}"
    remote = mount.kind in _REMOTE or mount.kind.startswith("fuse.")
    return warn(seen) if remote else ok(seen)


CHECKS = {
    "AMP501": _part("config", "config.json is one of a DeepSeek-V4.1"),
    "AMP502": _part("shards", "every shard is there"),
    "AMP503": _part("headers", "every shard is as long as its header says"),
    "AMP504": _part("tensors", "the tensors are those of config.json"),
    "AMP505": _tokenizer,
    "AMP506": _local,
}
