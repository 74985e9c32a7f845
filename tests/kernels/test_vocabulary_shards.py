# SPDX-License-Identifier: Apache-2.0
"""Shards of a vocabulary on several processes sample what one process samples from all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("shard_rank.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_choose_as_the_whole(ranks, tmp_path):
    """Greedy and with noise; eight bytes a request are all that a rank sends. Three ranks have unequal shards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command, store = [sys.executable, str(RANK)], str(tmp_path / "store")
    started = [subprocess.Popen([*command, str(rank), str(ranks), store], **pipes) for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
    for text in said:
        equal, tied = (int(word) for word in text.splitlines()[-1].split() if word.isdigit())
        assert equal == 16 * 9 * 5 and tied > 100
