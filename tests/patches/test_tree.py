# SPDX-License-Identifier: Apache-2.0
"""Applying, reverting and exporting, on trees in every state."""

import errno
import os
import sys
import types

import pytest

from vllm.ampere import upstream
from vllm.ampere.errors import PatchError, UsageError
from vllm.ampere.patching import series, transaction, tree

VERSION = "0.33.0"


def read(root):
    files = (file for file in root.rglob("*") if file.is_file() and ".git" not in file.parts)
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def folders(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir()}


def apply(root, example):
    return tree.apply(root, example.changes, VERSION)


def revert(root, example):
    return tree.revert(root, example.changes, VERSION)


def state(root, example):
    return tree.summary(root, tree.survey(root, example.changes))


def test_apply_gives_what_git_made_and_revert_the_original(root, example):
    before = folders(root)
    assert state(root, example) == "not applied"
    changed, recovered = apply(root, example)
    assert changed == sorted(example.series.hashes) and not recovered
    assert read(root) == example.after
    assert (root / "vllm/extra/deep/hook.py").stat().st_mode & 0o777 == 0o755
    assert state(root, example) == "applied"
    revert(root, example)
    assert read(root) == example.before
    assert folders(root) == before
    assert state(root, example) == "not applied"


def test_second_apply_and_second_revert_do_nothing(root, example):
    apply(root, example)
    times = {path: (root / path).stat().st_mtime_ns for path in example.after}
    assert apply(root, example) == ([], False)
    assert times == {path: (root / path).stat().st_mtime_ns for path in example.after}
    revert(root, example)
    assert revert(root, example) == ([], False)
    assert read(root) == example.before


def test_a_partly_applied_tree_goes_either_way(root, example):
    (root / "vllm/model.py").write_bytes(example.after["vllm/model.py"])
    assert state(root, example) == "partly applied"
    apply(root, example)
    assert read(root) == example.after
    (root / "vllm/model.py").write_bytes(example.before["vllm/model.py"])
    revert(root, example)
    assert read(root) == example.before


@pytest.mark.parametrize("damage, message, hint", [
    (lambda r: (r / "vllm/model.py").write_bytes(b"mine\n"), "vllm/model.py is neither vLLM 0.33.0's nor the patched one$",
     "pip install --force-reinstall --no-deps vllm==0.33.0"),
    (lambda r: (r / "vllm/model.py").open("ab").write(b"\n"), "vllm/model.py is neither", "bring the original back"),
    (lambda r: (r / "vllm/tail.py").unlink(), "vllm/tail.py is missing$", "bring the original back"),
    (lambda r: [(r / p).unlink() for p in ("vllm/tail.py", "vllm/model.py")], r"vllm/model.py is missing \(and 1 more\)", "bring"),
    (lambda r: (r / "vllm/extra/deep").mkdir(parents=True, exist_ok=True) or (r / "vllm/extra/deep/hook.py").write_bytes(b"theirs\n"),
     "vllm/extra/deep/hook.py is neither", "bring the original back"),
    (lambda r: (r / "vllm/_version.py").write_text("__version__ = version = '0.32.0'\n") and (r / "vllm/model.py").write_bytes(b""),
     r"holds vLLM 0\.32\.0; the patches are for 0\.33\.0", "pip install vllm==0.33.0"),
    (lambda r: (r / "vllm/model.py").unlink() or (r / "vllm/model.py").mkdir(), "cannot read .*model.py: Is a directory", "owner"),
])
@pytest.mark.parametrize("action", [apply, revert])
def test_a_file_that_is_neither_is_refused_and_nothing_is_touched(root, example, action, damage, message, hint):
    if action is revert:
        apply(root, example)
    damage(root)
    before = read(root)
    with pytest.raises(PatchError, match=message) as raised:
        action(root, example)
    assert hint in raised.value.hint
    assert "\n" not in str(raised.value) + raised.value.hint
    assert read(root) == before and not transaction.interrupted(root)


def failing(monkeypatch, call, number, error):
    real, calls = getattr(os, call), []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(transaction.os, call, fail)


DENIED = PermissionError(errno.EACCES, "Permission denied")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call, number, error, hint", [
    ("mkdir", 1, DENIED, "as the user who installed vLLM"),
    ("mkdir", 1, READ_ONLY, "the filesystem is read-only"),
    ("replace", 1, FULL, "make some room"),
    ("replace", 4, FULL, "make some room"),
    ("replace", 5, DENIED, "as the user who installed vLLM"),
    ("fsync", 4, FULL, "make some room"),
    ("unlink", 1, OSError(errno.EIO, "Input/output error"), "mend that"),
])
@pytest.mark.parametrize("action", [apply, revert])
def test_a_tree_that_cannot_be_written_stays_as_it_was(root, example, monkeypatch, action, call, number, error, hint):
    if action is revert:
        apply(root, example)
    before = read(root)
    failing(monkeypatch, call, number, error)
    with pytest.raises(PatchError, match=f"cannot write to .*, left as it was: {error.strerror}") as raised:
        action(root, example)
    monkeypatch.undo()
    assert hint in raised.value.hint
    assert read(root) == before and not transaction.interrupted(root)


@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_interrupt_half_way_leaves_the_tree_as_it_was(root, example, monkeypatch, number):
    failing(monkeypatch, "replace", number, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        apply(root, example)
    monkeypatch.undo()
    assert read(root) == example.before and not transaction.interrupted(root)


@pytest.mark.parametrize("action, result", [(apply, "after"), (revert, "before")])
def test_the_run_after_a_kill_rolls_back_first(root, example, action, result):
    child = os.fork()
    if child == 0:
        real, calls = os.replace, []
        os.replace = lambda *given: os._exit(9) if len(calls) == 3 else (calls.append(1), real(*given))
        apply(root, example)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert state(root, example) == "interrupted"
    states = {file.state for file in tree.survey(root, example.changes)}
    assert states == {tree.ORIGINAL, tree.PATCHED}, "the kill came too early or too late"
    _, recovered = action(root, example)
    assert recovered and read(root) == getattr(example, result)


def test_linked_install_keeps_the_cache(root, example, tmp_path):
    """uv links installed files to its cache, hard or symbolic: neither may be written through."""
    cache = tmp_path / "cache"
    cache.mkdir()
    os.link(root / "vllm/model.py", cache / "hard")
    (cache / "soft").write_bytes(example.before["vllm/layers/norm.py"])
    (root / "vllm/layers/norm.py").unlink()
    (root / "vllm/layers/norm.py").symlink_to(cache / "soft")
    apply(root, example)
    assert read(root) == example.after
    assert (cache / "hard").read_bytes() == example.before["vllm/model.py"]
    assert (cache / "soft").read_bytes() == example.before["vllm/layers/norm.py"]


def test_locate(root, tmp_path, monkeypatch):
    assert tree.locate(root) == root
    with pytest.raises(UsageError, match="is the package, not the tree") as raised:
        tree.locate(root / "vllm")
    assert str(root) in raised.value.hint
    with pytest.raises(UsageError, match="is not a vLLM tree"):
        tree.locate(tmp_path / "nothing")
    (tmp_path / "hollow/vllm/ampere").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hollow"), str(root)])
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    assert tree.locate(None) == root
    monkeypatch.setattr(sys, "path", [str(tmp_path / "hollow")])
    with pytest.raises(PatchError, match="no vLLM is installed") as raised:
        tree.locate(None)
    assert "patches fetch" in raised.value.hint


@pytest.fixture
def overlay():
    return tree.overlay_changes()


def test_overlay_goes_in_and_out_with_the_series(root, example, overlay):
    paths = {change.path for change in overlay}
    assert "vllm/ampere/patching/tree.py" in paths
    assert not [path for path in paths if "__pycache__" in path or "_shipped" in path]
    before = folders(root)
    tree.apply(root, example.changes + overlay, VERSION)
    assert read(root) == example.after | {path: (tree.OVERLAY.parents[1] / path).read_bytes() for path in paths}
    tree.revert(root, example.changes + overlay, VERSION)
    assert read(root) == example.before and folders(root) == before


def test_another_overlay_is_not_overwritten(root, example, overlay):
    (root / "vllm/ampere").mkdir()
    (root / "vllm/ampere/errors.py").write_bytes(b"older\n")
    before = read(root)
    with pytest.raises(PatchError, match="vllm/ampere/errors.py is neither") as raised:
        tree.apply(root, example.changes + overlay, VERSION)
    assert "another overlay is there: remove" in raised.value.hint and read(root) == before


def test_the_running_overlay_is_never_a_target(root):
    (root / "vllm/ampere").symlink_to(tree.OVERLAY)
    with pytest.raises(UsageError, match="runs this very overlay"):
        tree.refuse_own_overlay(root)


@pytest.mark.parametrize("patched", [False, True])
def test_export_applies_with_git(root, example, overlay, tmp_path, git, patched):
    if patched:
        apply(root, example)
    exported = tree.export(root, example.series)
    fresh = tmp_path / "fresh"
    for path, content in example.before.items():
        (fresh / path).parent.mkdir(parents=True, exist_ok=True)
        (fresh / path).write_bytes(content)
    git(fresh, "init", "-q")
    git(fresh, "add", "-A")
    git(fresh, "commit", "-qm", "upstream")
    git(fresh, "apply", "--check", "--whitespace=nowarn", "-", input=exported)
    git(fresh, "apply", "--index", "--whitespace=nowarn", "-", input=exported)
    if not patched:
        tree.apply(root, example.changes + overlay, VERSION)
    else:
        tree.apply(root, overlay, VERSION)
    assert read(fresh) == read(root)
    assert os.access(fresh / "vllm/extra/deep/hook.py", os.X_OK)
    git(fresh, "reset", "-q", "--hard")
    git(fresh, "apply", "--3way", "--whitespace=nowarn", "-", input=exported)
    assert read(fresh) == read(root)


def test_export_refuses_a_tree_that_is_neither(root, example):
    (root / "vllm/tail.py").write_bytes(b"x")
    with pytest.raises(PatchError, match="vllm/tail.py is neither"):
        tree.export(root, example.series)


def test_real_series_on_the_pinned_tree(upstream_tree, tmp_path, git):
    """Our apply, git's apply of our export, and the recorded hashes agree; revert gives the wheel's bytes."""
    loaded = series.load(upstream.series_dir(), upstream.version())
    changes = tree.series_changes(loaded)
    overlay = tree.overlay_changes()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    original = {"vllm/__init__.py": (upstream_tree / "vllm/__init__.py").read_bytes()}
    original |= {c.path: (upstream_tree / c.path).read_bytes() for c in changes if c.pair.before}
    for root in (ours, theirs):
        for path, content in original.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    git(theirs, "init", "-q")
    git(theirs, "apply", "--whitespace=nowarn", "-", input=tree.export(ours, loaded))
    tree.apply(ours, changes + overlay, loaded.version)
    assert read(ours) == read(theirs)
    assert {c.path: series.sha256(read(ours).get(c.path)) for c in changes} == {c.path: c.pair.after for c in changes}
    tree.revert(ours, changes + overlay, loaded.version)
    assert read(ours) == original
