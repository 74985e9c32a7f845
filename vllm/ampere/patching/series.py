# SPDX-License-Identifier: Apache-2.0
"""The patch series: what each patch says above its diff, and the hashes of every file before and after.

A folder holds `series` (names in order, `#` comments), the patches it names, and two generated files:
`hashes.json`, which makes a tree recognisable, and `README.md`. A patch starts with one line that says
what it does, then fields, then the diff:

    Choose the Ampere attention class on capability 8

    Class: extension-point
    Why: ...
    Gate: ...
    Origin: ...
    Remove-when: ...

    diff --git a/vllm/... b/vllm/...
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from ..errors import PatchError
from . import diff
from .diff import FileDiff

CLASSES = ("upstream-fix", "extension-point", "behaviour")
FIELDS = ("Class", "Why", "Gate", "Origin", "Remove-when")
LENGTH_FIELD = "Length"
ADDED_LINES_MAX = 40
HASHES = "hashes.json"

_NAME = re.compile(r"(\d{4})-[a-z0-9]+(-[a-z0-9]+)+\.patch")
_FIELD = re.compile(r"([A-Z][a-z]+(?:-[a-z]+)*):\s*(.*)")


def sha256(content: bytes | None) -> str | None:
    """Hex digest of a file's bytes; None for no file."""
    return None if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Patch:
    """One patch of the series.

    Attributes:
        name: file name.
        subject: first line, an imperative sentence.
        fields: header field to value, on one line each.
        files: what it does, file by file.
    """

    name: str
    subject: str
    fields: Mapping[str, str]
    files: tuple[FileDiff, ...]

    @property
    def added_lines(self) -> int:
        """Lines that its diff adds."""
        return sum(hunk.added for file in self.files for hunk in file.hunks)


@dataclass(frozen=True)
class Pair:
    """SHA-256 of one file before and after the series; None where it does not exist."""

    before: str | None
    after: str | None


@dataclass(frozen=True)
class Series:
    """The patches in order, and the hashes that they were made for.

    Attributes:
        version: the vLLM release whose files are "before".
        patches: in the order of application.
        hashes: path to its pair, for each file that a patch touches.
    """

    version: str
    patches: tuple[Patch, ...]
    hashes: Mapping[str, Pair]

    def of_path(self, path: str) -> list[tuple[Patch, FileDiff]]:
        """The patches that touch a path, in order, each with its diff of it."""
        return [(patch, file) for patch in self.patches for file in patch.files if file.path == path]

    def mode(self, path: str) -> int:
        """Permission bits for a path if the series, or its reversal, creates it."""
        return next((file.mode for _, file in self.of_path(path) if file.kind != "edit"), 0o644)

    def forward(self, path: str, content: bytes | None) -> bytes | None:
        """The patched file from upstream's.

        Raises:
            PatchError: a hunk does not fit, or the result is not the recorded one.
        """
        return self._checked(path, run_forward(self.of_path(path), content), self.hashes[path].after)

    def backward(self, path: str, content: bytes | None) -> bytes | None:
        """Upstream's file from the patched one; raises as `forward` does."""
        for patch, file in reversed(self.of_path(path)):
            content = _apply(patch, file.reversed(), content)
        return self._checked(path, content, self.hashes[path].before)

    def _checked(self, path: str, content: bytes | None, wanted: str | None) -> bytes | None:
        if sha256(content) != wanted:
            raise PatchError(f"the series gives another {path} than {HASHES} records", _REFRESH)
        return content


_REFRESH = "in a checkout, run `vllm-ampere patches refresh TREE` on an unpatched tree"


def run_forward(steps: list[tuple[Patch, FileDiff]], content: bytes | None) -> bytes | None:
    """Apply one path's diffs in order; a failure names the patch."""
    for patch, file in steps:
        content = _apply(patch, file, content)
    return content


def _apply(patch: Patch, file: FileDiff, content: bytes | None) -> bytes | None:
    try:
        return file.apply(content)
    except PatchError as error:
        raise PatchError(f"{patch.name}: {error}", _REFRESH) from error


def read_patch(path: Path) -> Patch:
    """Parse one patch file; header fields may be missing or unknown, which `problems` reports."""
    text = path.read_bytes()
    start = re.search(rb"^diff --git ", text, re.MULTILINE)
    if not start:
        raise PatchError(f"{path.name} has no `diff --git` line", "write patches with `git diff`")
    header = text[: start.start()].decode()
    subject, fields = _parse_header(header)
    return Patch(path.name, subject, fields, diff.parse(text[start.start():], path.name, header.count("\n") + 1))


def _parse_header(header: str) -> tuple[str, dict[str, str]]:
    lines = header.strip().splitlines()
    fields: dict[str, str] = {}
    current = ""
    for line in lines[1:]:
        if found := _FIELD.fullmatch(line):
            current = found[1]
            fields[current] = found[2].strip()
        elif not line.strip():
            current = ""
        elif current:
            fields[current] = f"{fields[current]} {line.strip()}".strip()
    return (lines[0].strip() if lines else ""), fields


def listed(directory: Path) -> list[str]:
    """Patch names in the order of the file `series`."""
    path = directory / "series"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}", "reinstall vllm-ampere") from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def read_patches(directory: Path) -> tuple[Patch, ...]:
    """The patches that `series` lists, in order."""
    patches = []
    for name in listed(directory):
        try:
            patches.append(read_patch(directory / name))
        except OSError as error:
            raise PatchError(f"cannot read the patch {name}: {error.strerror}", "reinstall vllm-ampere") from error
    return tuple(patches)


def touched(patches: tuple[Patch, ...]) -> list[str]:
    """Paths that the patches touch, sorted."""
    return sorted({file.path for patch in patches for file in patch.files})


def load(directory: Path, version: str) -> Series:
    """The series with its recorded hashes.

    Raises:
        PatchError: a file is missing or malformed, or the hashes are of other patches or another release.
    """
    patches = read_patches(directory)
    try:
        recorded = json.loads((directory / HASHES).read_text())
        hashes = {path: Pair(**pair) for path, pair in recorded["files"].items()}
        same_release = recorded["vllm"] == version
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(f"cannot read {directory / HASHES}: {error}", _REFRESH) from error
    if sorted(hashes) != touched(patches) or not same_release:
        raise PatchError(f"{directory / HASHES} is not of these patches", _REFRESH)
    return Series(version, patches, hashes)


def render_hashes(version: str, hashes: Mapping[str, Pair]) -> str:
    """The text of `hashes.json`."""
    files = {path: {"before": hashes[path].before, "after": hashes[path].after} for path in sorted(hashes)}
    return json.dumps({"vllm": version, "files": files}, indent=2) + "\n"


def problems(directory: Path) -> list[str]:
    """What is wrong with the folder by the rules of a patch, one line each; empty if nothing is.

    Raises:
        PatchError: a listed patch is missing or is not a diff.
    """
    names = listed(directory)
    found = [f"{name} is listed {count} times" for name, count in Counter(names).items() if count > 1]
    unused = {path.name for path in directory.glob("*.patch")} - set(names)
    found += [f"{name} is not listed in series" for name in sorted(unused)]
    numbers = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    if any(number % 10 for number in numbers) or numbers != sorted(set(numbers)):
        found.append("numbers must rise in steps of ten")
    for patch in read_patches(directory):
        found += [f"{patch.name}: {problem}" for problem in _patch_problems(patch)]
    return found


def _patch_problems(patch: Patch) -> list[str]:
    found = []
    if not _NAME.fullmatch(patch.name):
        found.append("must be named NNNN-<area>-<imperative>.patch")
    if not patch.subject or _FIELD.fullmatch(patch.subject):
        found.append("must start with a line that says what it does")
    found += [f"lacks the field {field}" for field in FIELDS if not patch.fields.get(field)]
    found += [f"has the unknown field {field}" for field in patch.fields if field not in (*FIELDS, LENGTH_FIELD)]
    if patch.fields.get("Class") and patch.fields["Class"] not in CLASSES:
        found.append(f"Class is {patch.fields['Class']}, must be one of {', '.join(CLASSES)}")
    if patch.added_lines > ADDED_LINES_MAX and not patch.fields.get(LENGTH_FIELD):
        found.append(f"adds {patch.added_lines} lines, more than {ADDED_LINES_MAX}: say why in a field {LENGTH_FIELD}")
    for file in patch.files:
        if not file.path.startswith("vllm/") or file.path.startswith("vllm/ampere/"):
            found.append(f"touches {file.path}: a patch edits vllm/, the overlay holds vllm/ampere/")
    return found


_README = """\
# Patches onto vLLM {version}

Generated by `vllm-ampere patches refresh`; edit the patches, not this table.

| patch | what it does | class | files | added lines | other GPUs | remove when |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
To change a patch: `vllm-ampere patches fetch TREE` brings the pinned tree; make it a git repository, apply the
patches one by one with `git apply` in the order of `series`, edit, replace the diff below the message with
`git diff`, and run `vllm-ampere patches refresh` with a fresh tree. It refuses a series that breaks a rule.
"""


def render_readme(version: str, patches: tuple[Patch, ...]) -> str:
    """The text of `README.md`."""
    rows = ""
    for patch in patches:
        files = "<br>".join(f"`{file.path}`" for file in patch.files)
        cells = (
            f"[{patch.name.partition('-')[0]}]({patch.name})",
            patch.subject,
            patch.fields.get("Class", ""),
            files,
            str(patch.added_lines),
            patch.fields.get("Gate", ""),
            patch.fields.get("Remove-when", ""),
        )
        rows += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return _README.format(version=version, rows=rows)
