# SPDX-License-Identifier: Apache-2.0
"""The rules of a patch: that each is enforced, and that the real series keeps them all."""

import base64
import csv
import json
import shutil

import pytest

from vllm.ampere import upstream
from vllm.ampere.errors import PatchError
from vllm.ampere.patching import series, tree

REAL = upstream.series_dir()


@pytest.fixture
def copy(example, tmp_path):
    """The example's folder, to be damaged."""
    return shutil.copytree(example.directory, tmp_path / "series")


def names(directory):
    return sorted(path.name for path in directory.glob("*.patch"))


def edit(directory, number, old, new):
    path = directory / names(directory)[number]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rename(directory, number, name):
    old = names(directory)[number]
    (directory / old).rename(directory / name)
    order = directory / "series"
    order.write_text(order.read_text().replace(old, name))


LONG = "@@ -0,0 +1,41 @@\n" + "".join(f"+{n}\n" for n in range(41))
LONG_PATCH = "Add much\n\nClass: behaviour\nWhy: w\nGate: g\nOrigin: o\nRemove-when: r\n{}\n" \
    "diff --git a/vllm/z.py b/vllm/z.py\nnew file mode 100644\n--- /dev/null\n+++ b/vllm/z.py\n" + LONG


def append(directory, name, text):
    (directory / name).write_text(text)
    with open(directory / "series", "a") as file:
        file.write(f"{name}\n")


@pytest.mark.parametrize("damage, problem", [
    (lambda d: None, None),
    (lambda d: edit(d, 0, "Why: because", "Whi: because"), "lacks the field Why"),
    (lambda d: edit(d, 0, "Why: because", "Whi: because"), "has the unknown field Whi"),
    (lambda d: edit(d, 1, "Remove-when: upstream has it\n", ""), "lacks the field Remove-when"),
    (lambda d: edit(d, 1, "Gate: capability 8 | nothing else", "Gate:"), "lacks the field Gate"),
    (lambda d: edit(d, 2, "Class: extension-point", "Class: feature"), "Class is feature, must be one of upstream-fix"),
    (lambda d: edit(d, 0, "Do step 1 of the example\n", ""), "must start with a line that says what it does"),
    (lambda d: edit(d, 2, "vllm/tail.py b/vllm/tail.py", "csrc/tail.py b/csrc/tail.py")
        or edit(d, 2, "--- a/vllm/tail", "--- a/csrc/tail") or edit(d, 2, "+++ b/vllm/tail", "+++ b/csrc/tail"), "touches csrc/tail.py"),
    (lambda d: rename(d, 2, "0031-example-do-step.patch"), "numbers must rise in steps of ten"),
    (lambda d: rename(d, 2, "0005-example-do-step.patch"), "numbers must rise in steps of ten"),
    (lambda d: rename(d, 2, "0030-Example.patch"), "must be named NNNN-<area>-<imperative>.patch"),
    (lambda d: (d / "0090-not-listed.patch").write_text(""), "0090-not-listed.patch is not listed"),
    (lambda d: (d / "series").write_text("\n".join(names(d) + names(d)[:1])), "is listed 2 times"),
    (lambda d: append(d, "0040-long-add.patch", LONG_PATCH.format("")), "adds 41 lines, more than 40"),
    (lambda d: append(d, "0040-long-add.patch", LONG_PATCH.format("Length: one table\n")), None),
])
def test_each_rule_is_enforced(copy, damage, problem):
    damage(copy)
    found = series.problems(copy)
    assert (not found) if problem is None else any(problem in line for line in found), found


def test_header(example):
    first = example.series.patches[0]
    assert first.subject == "Do step 1 of the example"
    assert first.fields == {
        "Class": "extension-point",
        "Why": "because the example needs it in two lines",
        "Gate": "capability 8 | nothing else",
        "Origin": "ours",
        "Remove-when": "upstream has it",
    }
    assert [patch.added_lines for patch in example.series.patches] == [3, 5, 1]
    assert example.series.mode("vllm/extra/deep/hook.py") == 0o755


@pytest.mark.parametrize("damage, message", [
    (lambda d: (d / "hashes.json").unlink(), "cannot read .*hashes.json"),
    (lambda d: (d / "hashes.json").write_text("{"), "cannot read .*hashes.json"),
    (lambda d: (d / "hashes.json").write_text('{"vllm": "0.33.0", "files": {"vllm/model.py": 3}}'), "cannot read .*hashes.json"),
    (lambda d: (d / "hashes.json").write_text('{"vllm": "0.33.0", "files": {}}'), "is not of these patches"),
    (lambda d: (d / "hashes.json").write_text((d / "hashes.json").read_text().replace("0.33.0", "0.34.0")), "is not of these patches"),
    (lambda d: (d / names(d)[1]).unlink(), "cannot read the patch 0020-example-do-step-b.patch"),
    (lambda d: (d / "series").unlink(), "cannot read .*series"),
    (lambda d: (d / names(d)[0]).write_text("Title\n\nClass: behaviour\n"), "0010-example-do-step-a.patch has no `diff --git` line"),
    (lambda d: edit(d, 0, "@@ -", "@@ ="), r"0010-example-do-step-a.patch:14: malformed hunk header"),
])
def test_a_damaged_folder_is_named(copy, damage, message):
    damage(copy)
    with pytest.raises(PatchError, match=message) as raised:
        series.load(copy, "0.33.0")
    assert raised.value.hint


def test_a_result_other_than_the_recorded_one_is_refused(copy, example):
    recorded = json.loads((copy / "hashes.json").read_text())
    recorded["files"]["vllm/model.py"]["after"] = "0" * 64
    (copy / "hashes.json").write_text(json.dumps(recorded))
    loaded = series.load(copy, "0.33.0")
    with pytest.raises(PatchError, match="gives another vllm/model.py than hashes.json records"):
        loaded.forward("vllm/model.py", example.before["vllm/model.py"])


def test_refresh_writes_nothing_for_a_bad_series(copy, root):
    kept = {path.name: path.read_bytes() for path in copy.iterdir()}
    for damage, message in (
        (lambda: edit(copy, 0, "Class: extension-point", "Class: x"), "Class is x"),
        (lambda: edit(copy, 0, " line 8\n", " line eight\n"), "0010-.*: vllm/model.py: hunk at line .* matches nothing"),
    ):
        damage()
        changed = names(copy)[0]
        with pytest.raises(PatchError, match=message):
            tree.refresh(root, copy, "0.33.0")
        assert all((copy / name).read_bytes() == kept[name] for name in kept if name != changed)
        (copy / changed).write_bytes(kept[changed])


def test_refresh_refuses_patches_that_undo_each_other(copy, root):
    text = (copy / names(copy)[2]).read_text()
    message, body = text.split("diff --git", 1)
    diff = "diff --git a/vllm/new.py b/vllm/new.py\n{} file mode 100644\n--- {}\n+++ {}\n{}\n"
    append(copy, "0040-new-add.patch", message + diff.format("new", "/dev/null", "b/vllm/new.py", "@@ -0,0 +1 @@\n+x"))
    append(copy, "0050-new-drop.patch", message + diff.format("deleted", "a/vllm/new.py", "/dev/null", "@@ -1 +0,0 @@\n-x"))
    with pytest.raises(PatchError, match="leave vllm/new.py as it was"):
        tree.refresh(root, copy, "0.33.0")


def test_readme_table(example):
    text = (example.directory / "README.md").read_text()
    assert "| [0030](0030-example-do-step-c.patch) | Do step 3 of the example | extension-point | " \
        "`vllm/old/gone.py`<br>`vllm/tail.py` | 1 | capability 8 \\| nothing else | upstream has it |\n" in text


def test_real_series_keeps_the_rules():
    assert series.problems(REAL) == []


def test_real_generated_files_are_current(upstream_tree):
    patches = series.read_patches(REAL)
    hashes = tree.compute_hashes(upstream_tree, patches)
    hint = "run `vllm-ampere patches refresh TREE`"
    assert (REAL / "hashes.json").read_text() == series.render_hashes(upstream.version(), hashes), hint
    assert (REAL / "README.md").read_text() == series.render_readme(upstream.version(), patches), hint


def test_real_before_hashes_are_those_of_the_wheel(upstream_tree):
    """Against the RECORD that the wheel brings, which this project did not compute."""
    with open(upstream_tree / f"vllm-{upstream.version()}.dist-info" / "RECORD") as file:
        recorded = {path: digest.removeprefix("sha256=") for path, digest, _ in csv.reader(file)}
    loaded = series.load(REAL, upstream.version())
    assert len(recorded) > 5000
    for path, pair in loaded.hashes.items():
        wanted = recorded.get(path)
        found = pair.before and base64.urlsafe_b64encode(bytes.fromhex(pair.before)).decode().rstrip("=")
        assert found == wanted, path
    sample = "vllm/__init__.py"
    digest = bytes.fromhex(series.sha256((upstream_tree / sample).read_bytes()))
    assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == recorded[sample]
