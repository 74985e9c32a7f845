# SPDX-License-Identifier: Apache-2.0
"""Server logs: each code on lines that show it, silence on a good log, and whatever bytes a file may hold."""

import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doctor.log_lines import GOOD, SHOWING
from vllm.ampere.doctor import logs
from vllm.ampere.doctor.catalogue import codes
from vllm.ampere.doctor.findings import Status
from vllm.ampere.errors import UsageError

CASES = [(code, log) for code, shown in SHOWING.items() for log in shown]


def read(tmp_path, content: str | bytes):
    file = tmp_path / "server.log"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return logs.read_log(file)


@pytest.mark.parametrize("code, log", CASES, ids=[f"{code}-{log[:24]}" for code, log in CASES])
def test_shown(tmp_path, code, log):
    """The code, alone, at its line among good ones."""
    head, tail = GOOD.splitlines(keepends=True)[:5], GOOD.splitlines(keepends=True)[12:]
    (finding,) = read(tmp_path, "".join(head) + log + "\n" + "".join(tail))
    assert finding.code == code
    assert finding.status is (Status.WARN if codes()[code].advice else Status.FAIL)
    lines = log.splitlines()
    number = len(head) + len(lines)
    assert finding.seen.startswith(f"line {number}: {' '.join(lines[-1].split())[:60]}")
    assert finding.fix == codes()[code].fix and finding.title == codes()[code].title


def test_every_code_of_a_log_has_lines_and_each_pattern_of_it():
    wanted = {code for code, entry in codes().items() if entry.patterns}
    assert wanted == set(SHOWING) and len(wanted) >= 12
    for code in wanted:
        for pattern in codes()[code].patterns:
            expression = ".*".join(map(re.escape, pattern.split("...")))
            assert any(re.search(expression, log) for log in SHOWING[code]), f"{code}: no line for {pattern}"


def test_a_good_log(tmp_path):
    """No code fires: for each of them this is the log on which it must not."""
    (finding,) = read(tmp_path, GOOD)
    assert (finding.code, finding.status, finding.fix) == ("AMP700", Status.OK, "")
    assert finding.seen == f"no failure in {len(GOOD.splitlines())} lines"


@pytest.mark.parametrize("lines, shown", [
    (["(Worker pid=1) ERROR 11-29 [x.py:1] it broke",
      "(Worker pid=1) ERROR [x.py:2] ValueError: the moon is full\x1b[0m", "KeyError: 'later'"], 1),
    (["(Worker pid=1) WARNING 11-29 [x.py:1] ValueError: never mind", "CRITICAL it broke", "ERROR: again"], 1),
])
def test_an_unknown_error_is_said_to_be_unknown(tmp_path, lines, shown):
    """The first that names an exception, else the first that says so; no warning is one."""
    (finding,) = read(tmp_path, GOOD + "\n".join(lines) + "\nINFO done\n")
    number = len(GOOD.splitlines()) + 1 + shown
    assert (finding.code, finding.status, finding.fix) == ("AMP700", Status.UNKNOWN, codes()["AMP700"].fix)
    assert finding.seen.endswith(f"the first error is line {number}: {lines[shown].removesuffix(chr(27) + '[0m')}")


def test_warnings_are_no_errors(tmp_path):
    (finding,) = read(tmp_path, GOOD + "(W pid=1) WARNING 11-29 [x.py:1] Found ulimit, with error ValueError: no\n")
    assert finding.status is Status.OK


def test_first_cause_first_and_counted(tmp_path):
    kill, closed = SHOWING["AMP707"][0], SHOWING["AMP711"][0]
    found = read(tmp_path, f"{kill}\n{closed}\n{closed}\n{kill}\n")
    assert [finding.code for finding in found] == ["AMP707", "AMP711"]
    assert found[0].seen.startswith("line 1 (2 lines): ") and found[1].seen.startswith("line 2 (2 lines): ")


def test_colours_and_carriage_returns(tmp_path):
    line = SHOWING["AMP715"][0].replace("KV cache", "\x1b[31mKV\x1b[0m cache", 1)
    (finding,) = read(tmp_path, f"progress\r50%\rdone\r{line}\r\n")
    assert finding.code == "AMP715" and "\x1b" not in finding.seen and "\r" not in finding.seen


def test_a_line_without_end_is_read_in_parts(tmp_path):
    """Two mebibytes without a line break, and the failure after them."""
    found = read(tmp_path, b"\x00\xff" * (1 << 20) + b"\n" + SHOWING["AMP723"][0].encode())
    assert [finding.code for finding in found] == ["AMP723"]


def test_a_long_log_is_streamed(tmp_path):
    """Six megabytes, of which never more than a few lines are held."""
    content = (GOOD * (6_000_000 // len(GOOD)) + SHOWING["AMP707"][0]).encode()
    file = tmp_path / "server.log"
    file.write_bytes(content)
    lines, size = content.count(b"\n"), len(content)
    del content
    tracemalloc.start()
    try:
        (finding,) = logs.read_log(file)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert finding.seen.startswith(f"line {lines + 1}: ") and finding.code == "AMP707"
    assert peak_bytes < size / 20


WORDS = st.text(max_size=200).map(lambda text: text.encode(errors="replace"))
FRAGMENTS = st.sampled_from([line for shown in SHOWING.values() for line in shown])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(st.binary(max_size=200), WORDS, FRAGMENTS.map(str.encode)), max_size=12),
       st.sampled_from([b"\n", b"\r\n", b"\0", b""]))
def test_any_bytes(tmp_path_factory, parts, between):
    """Every file is read, and what is said of it is printable and of codes that exist."""
    file = tmp_path_factory.getbasetemp() / "any.log"
    file.write_bytes(between.join(parts))
    found = logs.read_log(file)
    assert found and len({finding.code for finding in found}) == len(found)
    for finding in found:
        assert codes()[finding.code].area == "logs"
        assert finding.seen.isprintable() and len(finding.seen) < 400


@settings(deadline=None, max_examples=100)
@given(FRAGMENTS, st.integers(min_value=1, max_value=200), st.data())
def test_half_of_a_known_line(fragment, kept, data):
    """A line that the disk, or a kill, cut short."""
    start = data.draw(st.integers(min_value=0, max_value=len(fragment)))
    found = logs.scan(fragment[start : start + kept].splitlines(keepends=True))
    whole = {code for code, shown in SHOWING.items() if any(fragment == log for log in shown)}
    # The cut may take the words away that tell two failures apart, and with them the failure.
    assert {finding.code for finding in found} <= whole | {"AMP700", "AMP706", "AMP711"}


@pytest.mark.parametrize("make, words", [
    (lambda folder: folder / "server.log", "No such file or directory"),
    (lambda folder: folder, "is a folder, not a log"),
    (lambda folder: folder / "server.log" / "x", "No such file or directory"),
])
def test_what_is_no_log(tmp_path, make, words):
    with pytest.raises(UsageError, match=words) as raised:
        logs.read_log(make(tmp_path))
    assert raised.value.hint and "\n" not in str(raised.value)


def test_empty(tmp_path):
    (finding,) = read(tmp_path, b"")
    assert (finding.code, finding.seen) == ("AMP700", "no failure in 0 lines")
