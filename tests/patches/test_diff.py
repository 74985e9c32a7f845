# SPDX-License-Identifier: Apache-2.0
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.errors import PatchError
from vllm.ampere.patching import diff

LINES = [b"a\n", b"b\n", b"\n", b"carriage\r\n", b"lone\rreturn\n", b"form\x0cfeed\n", "é\u2028\n".encode(), b"-- x\n", b"++ y\n"]
contents = st.builds(
    lambda lines, last: b"".join(lines) + last, st.lists(st.sampled_from(LINES), max_size=12), st.sampled_from([b"", b"open end"])
)


@given(contents, contents)
@settings(max_examples=300, deadline=None)
def test_written_diff_applies_and_reverses(before, after):
    if before == after:
        return
    (parsed,) = diff.parse(diff.render("vllm/a.py", before, after, 0o644), "x.patch")
    assert parsed.apply(before) == after
    assert parsed.reversed().apply(after) == before
    assert parsed.reversed().reversed() == parsed


@given(contents)
@settings(deadline=None)
def test_creation_and_deletion(content):
    (created,) = diff.parse(diff.render("vllm/a.py", None, content, 0o755), "x.patch")
    assert (created.kind, created.mode, created.apply(None)) == ("create", 0o755, content)
    assert created.reversed().apply(content) is None
    (deleted,) = diff.parse(diff.render("vllm/a.py", content, None, 0o644), "x.patch")
    assert deleted.apply(content) is None
    assert deleted.reversed().apply(None) == content


@given(contents, contents)
@settings(max_examples=25, deadline=None)
def test_git_reads_our_diff_the_same_way(tmp_path_factory, before, after):
    if before == after:
        return
    folder = tmp_path_factory.mktemp("git")
    (folder / "a.py").write_bytes(before)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], cwd=folder, check=True, input=diff.render("a.py", before, after, 0o644))
    assert (folder / "a.py").read_bytes() == after


def patch(*body: str, head: str = "@@ -2,3 +2,4 @@") -> bytes:
    return "\n".join(["diff --git a/f b/f", "--- a/f", "+++ b/f", head, *body, ""]).encode()


HUNK = (" two", " three", "+added", " four")


@pytest.mark.parametrize("content, result", [
    (b"one\ntwo\nthree\nfour\n", b"one\ntwo\nthree\nadded\nfour\n"),
    (b"0\n0\none\ntwo\nthree\nfour\n", b"0\n0\none\ntwo\nthree\nadded\nfour\n"),
    (b"two\nthree\nfour\n", b"two\nthree\nadded\nfour\n"),
    (b"x\ntwo\nthree\nfour\ntwo\nthree\nfour\n", b"x\ntwo\nthree\nadded\nfour\ntwo\nthree\nfour\n"),
], ids=["as stated", "moved down", "moved up", "stated place wins over a second match"])
def test_place(content, result):
    (parsed,) = diff.parse(patch(*HUNK), "x.patch")
    assert parsed.apply(content) == result


@pytest.mark.parametrize("content, message", [
    (b"one\ntwo \nthree\nfour\n", "line 2 matches nothing"),
    (b"one\ntwo\nthree\n", "line 2 matches nothing"),
    (b"", "line 2 matches nothing"),
    (b"one\nx\ntwo\nthree\nfour\ntwo\nthree\nfour\n", "line 2 matches 2 places"),
    (b"one\ntwo\nthree\nfour", "line 2 matches nothing"),
    (None, "f does not exist"),
], ids=["one space more", "cut off", "empty", "twice, neither as stated", "no newline at the end", "no file"])
def test_no_fuzz(content, message):
    (parsed,) = diff.parse(patch(*HUNK), "x.patch")
    with pytest.raises(PatchError, match=message):
        parsed.apply(content)


def test_second_hunk_follows_the_drift_of_the_first():
    text = patch(" a", "+1", " b") .replace(b"@@ -2,3 +2,4 @@", b"@@ -1,2 +1,3 @@") + b"@@ -4,2 +5,3 @@\n c\n+2\n d\n"
    (parsed,) = diff.parse(text, "x.patch")
    assert parsed.apply(b"new\na\nb\nx\nc\nd\nc\nd\n") == b"new\na\n1\nb\nx\nc\n2\nd\nc\nd\n"


@pytest.mark.parametrize("text, message", [
    (patch(*HUNK, head="@@ -2,3 +2,5 @@"), "starts with a space"),
    (patch(*HUNK, head="@@ -2,2 +2,3 @@"), "x.patch:8: expected `diff --git"),
    (patch(*HUNK, head="@@ -2,1 +2,5 @@"), "starts with a space"),
    (patch("+added", head="@@ -2,0 +3,1 @@"), "needs a line of context"),
    (patch(*HUNK, head="@@ what @@"), "malformed hunk header"),
    (patch(*HUNK)[:-12], "starts with a space"),
    (patch(*HUNK) + patch(*HUNK), "f is changed twice"),
    (b"diff --git a/f b/g\nrename from f\nrename to g\n", "with one path"),
    (b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n", "expected `--- a/f`"),
    (b"diff --git a/f b/f\nindex 1..2\nGIT binary patch\n", "expected `--- a/f`"),
    (b"diff --git a/../f b/../f\n", "leaves the tree"),
    (b"diff --git a/f b/f\n--- a/f\n+++ b/f\n", "has no hunk"),
    (b"diff --git a/f b/f\n", "has no change"),
    (b"@@ -1 +1 @@\n", "expected `diff --git"),
])
def test_malformed(text, message):
    with pytest.raises(PatchError, match=message):
        diff.parse(text, "x.patch")


def test_a_line_without_newline_only_ends_a_file():
    text = patch("-two", "+TWO", "\\ No newline at end of file", head="@@ -2 +2 @@")
    (parsed,) = diff.parse(text, "x.patch")
    assert parsed.apply(b"one\ntwo\n") == b"one\nTWO"
    with pytest.raises(PatchError, match="ends the file, but lines follow"):
        parsed.apply(b"one\ntwo\nthree\n")


def test_a_created_file_must_not_exist_and_a_deleted_one_must_be_known():
    (created,) = diff.parse(diff.render("f", None, b"x\n", 0o644), "x.patch")
    with pytest.raises(PatchError, match="f exists already"):
        created.apply(b"x\n")
    with pytest.raises(PatchError, match="f is to be deleted, but has lines"):
        created.reversed().apply(b"x\ny\n")


def test_binary_is_refused():
    with pytest.raises(PatchError, match="f is not a text file"):
        diff.render("f", None, b"\0", 0o644)
