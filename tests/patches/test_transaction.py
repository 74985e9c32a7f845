# SPDX-License-Identifier: Apache-2.0
"""All or nothing, with a failure at every single line of the code that writes."""

import errno
import os
import signal
import sys

import pytest

from vllm.ampere.errors import PatchError
from vllm.ampere.patching import transaction
from vllm.ampere.patching.transaction import JOURNAL, Write, interrupted, locked, recover, replace_files

OLD = {"vllm/a.py": b"old a\n", "vllm/sub/b.py": b"old b\n", "vllm/gone/c.py": b"old c\n"}
NEW = {"vllm/a.py": b"new a\n", "vllm/sub/b.py": b"new b\n", "vllm/made/deep/d.py": b"new d\n"}
WRITES = {path: Write(OLD.get(path), NEW.get(path)) for path in sorted(OLD | NEW)}
ROLL_BACK = ("recover", "_roll_back")


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """Flushing only shows after a power cut, and takes most of the time."""
    monkeypatch.setattr(transaction.os, "fsync", lambda _: None)


@pytest.fixture
def fresh(tmp_path):
    """Makes old trees, one after another."""
    made = iter(range(10**6))

    def make():
        root = tmp_path / str(next(made))
        for path, content in OLD.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        return root

    return make


def state(root):
    """Files of the tree without the journal; folders too, by their name with a slash."""
    paths = [p for p in root.rglob("*") if ".ampere-journal" not in p.parts]
    return {p.relative_to(root).as_posix() + "/" * p.is_dir(): p.read_bytes() if p.is_file() else b"" for p in paths}


def at_line(wanted, happen, functions_left_out=()):
    """A trace function that calls `happen` at the `wanted`-th line of the module, and the count so far."""
    count = [0]

    def trace(frame, event, _):
        if frame.f_code.co_filename != transaction.__file__ or frame.f_code.co_name in functions_left_out:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == wanted:
                happen()
        return trace

    return trace, count


def run_traced(work, trace):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def is_old_or_new(root) -> bool:
    """Every file as before, or every file as afterwards; never some of each."""
    return {path: content for path, content in state(root).items() if content} in (OLD, NEW)


def line_count(fresh):
    trace, count = at_line(0, None, ROLL_BACK)
    root = fresh()
    run_traced(lambda: replace_files(root, WRITES), trace)
    return count[0]


class Killed(BaseException):
    """Stands for SIGKILL where a process for every line would take minutes."""


def killed(work, trace_of) -> bool:
    """Run `work` until the trace function that `trace_of(kill)` gives kills it; returns whether it did.

    The exception ends `work` with no rolling back, as a signal would.
    """
    def kill():
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        trace = trace_of(kill)
        real = transaction.recover
        patched.setattr(transaction, "recover", lambda root: isinstance(sys.exc_info()[1], Killed) or real(root))
        try:
            run_traced(work, trace)
        except Killed:
            return True
    return False


def really_killed(work, trace_of) -> bool:
    """The same with a process of its own, and a signal."""
    child = os.fork()
    if child == 0:
        try:
            run_traced(work, trace_of(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_replaces_creates_and_deletes(fresh):
    root = fresh()
    replace_files(root, WRITES)
    folders = ["vllm/", "vllm/sub/", "vllm/made/", "vllm/made/deep/"]
    assert state(root) == NEW | dict.fromkeys(folders, b"")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=["interrupt", "disk"])
def test_failure_at_every_line_leaves_old_or_new_at_once(fresh, error):
    def fail():
        raise error

    total = line_count(fresh)
    left_old = 0
    for wanted in range(1, total + 1):
        root = fresh()
        trace, _ = at_line(wanted, fail, ROLL_BACK)
        try:
            run_traced(lambda: replace_files(root, WRITES), trace)
        except type(error):
            pass
        assert is_old_or_new(root), f"line {wanted} of {total} left a mixed tree"
        left_old += state(root).get("vllm/a.py") == OLD["vllm/a.py"] and not interrupted(root)
        recover(root)
        assert is_old_or_new(root) and not interrupted(root)
    assert total > 150 and left_old > total // 2


@pytest.mark.parametrize("kill, step", [(killed, 1), (really_killed, 23)], ids=["simulated", "SIGKILL"])
def test_kill_at_any_line_is_rolled_back_by_the_next_run(fresh, kill, step):
    mixed = 0
    for wanted in range(1, line_count(fresh) + 1, step):
        root = fresh()
        assert kill(lambda: replace_files(root, WRITES), lambda happen: at_line(wanted, happen, ROLL_BACK)[0])
        mixed += not is_old_or_new(root)
        recover(root)
        assert is_old_or_new(root) and not interrupted(root), f"line {wanted}"
    assert mixed, "no kill left a mixed tree, so rolling back was not tested"


@pytest.mark.parametrize("kill, step", [(killed, 1), (really_killed, 23)], ids=["simulated", "SIGKILL"])
def test_kill_while_rolling_back_is_rolled_back_by_the_one_after(fresh, kill, step):
    def half_done():
        def at_fourth_put(happen):
            puts = []

            def trace(frame, event, _):
                if event == "call" and frame.f_code.co_name == "_put":
                    puts.append(frame)
                    if len(puts) == 4:
                        happen()

            return trace

        root = fresh()
        assert kill(lambda: replace_files(root, WRITES), at_fourth_put)
        assert not is_old_or_new(root)
        return root

    original = state(fresh())
    root = half_done()
    trace, count = at_line(0, None)
    run_traced(lambda: recover(root), trace)
    assert state(root) == original
    for wanted in range(1, count[0] + 1, step):
        root = half_done()
        assert kill(lambda: recover(root), lambda happen: at_line(wanted, happen)[0])
        recover(root)
        assert state(root) == original and not interrupted(root), f"line {wanted}"


@pytest.mark.parametrize("call", ["replace", "chmod", "fsync", "utime", "open"])
def test_error_of_one_call_leaves_the_tree_as_it_was(fresh, monkeypatch, call):
    real, calls = getattr(os, call), []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    root = fresh()
    original = state(root)
    monkeypatch.setattr(transaction.os, call, failing)
    with pytest.raises(OSError, match="No space left"):
        replace_files(root, WRITES)
    assert state(root) == original and not interrupted(root)


def test_a_roll_back_that_fails_says_so_and_the_next_run_does_it(fresh, monkeypatch):
    real, calls = os.replace, []

    def broken(source, target):
        calls.append(source)
        if len(calls) > 3:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    root = fresh()
    original = state(root)
    monkeypatch.setattr(transaction.os, "replace", broken)
    with pytest.raises(PatchError, match="half changed: .*Input/output error.* while rolling back") as raised:
        replace_files(root, WRITES)
    assert "rolls back first" in raised.value.hint
    assert state(root) != original and interrupted(root)
    monkeypatch.undo()
    assert recover(root) and state(root) == original


def test_a_file_changed_after_a_crash_is_not_overwritten(fresh, monkeypatch):
    def lose_power(*_):
        raise Killed

    root = fresh()
    monkeypatch.setattr(transaction, "_flush_folders", lose_power)
    assert killed(lambda: replace_files(root, WRITES), lambda _: None)
    (root / "vllm/a.py").write_bytes(b"somebody's\n")
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(PatchError, match="a.py was changed after an interrupted run") as raised:
            recover(root)
        assert (root / "vllm/a.py").read_bytes() == b"somebody's\n"
    saved = raised.value.hint.split()[1]
    assert open(saved, "rb").read() == OLD["vllm/a.py"]
    (root / "vllm/a.py").write_bytes(OLD["vllm/a.py"])
    recover(root)
    assert {p: c for p, c in state(root).items() if c} == OLD


def test_a_file_that_changes_between_survey_and_write_is_kept(fresh):
    root = fresh()
    (root / "vllm/sub/b.py").write_bytes(b"racing\n")
    with pytest.raises(PatchError, match="b.py changed a moment ago"):
        replace_files(root, WRITES)
    assert (root / "vllm/sub/b.py").read_bytes() == b"racing\n"
    assert (root / "vllm/a.py").read_bytes() == OLD["vllm/a.py"] and not interrupted(root)


def test_mode_time_and_hard_links(fresh, tmp_path, monkeypatch):
    root = fresh()
    target, cached = root / "vllm/a.py", tmp_path / "cached"
    target.chmod(0o750)
    os.utime(target, (1000, 1000))
    os.link(target, cached)
    replace_files(root, {"vllm/a.py": Write(b"old a\n", b"new\n"), "vllm/x.sh": Write(None, b"x\n", 0o755)})
    assert target.stat().st_mode & 0o777 == 0o750 and (root / "vllm/x.sh").stat().st_mode & 0o777 == 0o755
    assert cached.read_bytes() == b"old a\n", "the cache behind a hard link was changed"

    root = fresh()
    os.utime(root / "vllm/a.py", (1000, 1000))
    monkeypatch.setattr(transaction, "_flush_folders", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_files(root, {"vllm/a.py": Write(b"old a\n", b"new\n")})
    monkeypatch.undo()
    recover(root)
    assert (root / "vllm/a.py").stat().st_mtime == 1000, "the original's time is lost on rolling back"


def test_compiled_bytecode_of_changed_files_goes(fresh):
    root = fresh()
    cache = root / "vllm/__pycache__"
    cache.mkdir()
    for name in ("a.cpython-311.pyc", "a.cpython-312.opt-1.pyc", "ab.cpython-311.pyc"):
        (cache / name).write_bytes(b"")
    (root / "vllm/gone/__pycache__").mkdir()
    (root / "vllm/gone/__pycache__/c.cpython-311.pyc").write_bytes(b"")
    replace_files(root, WRITES)
    assert [p.name for p in cache.iterdir()] == ["ab.cpython-311.pyc"]
    assert not (root / "vllm/gone").exists()


def test_one_process_at_a_time(fresh):
    root = fresh()
    with locked(root):
        with pytest.raises(PatchError, match="another process is patching"):
            with locked(root):
                pass
    with locked(root):
        pass


def test_a_filesystem_without_locks_is_no_obstacle(fresh, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(transaction.fcntl, "flock", refuse)
    with locked(fresh()):
        pass


def test_nothing_to_recover(fresh):
    root = fresh()
    assert not recover(root)
    assert not (root / JOURNAL).exists()
