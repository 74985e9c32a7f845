# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

from tests.repo.checkout import ROOT


def test_ops_are_declared_without_triton_and_say_why_they_cannot_choose_it():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from vllm.ampere.errors import SelectionError\n"
        "from vllm.ampere.kernels.registry import all_ops\n"
        "op = all_ops()['e4m3_decode']\n"
        "assert [i.name for i in op.implementations] == ['triton']\n"
        "try: op.choose_for('sm80')\n"
        "except SelectionError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "triton lost: triton is not installed" in done.stdout, done.stderr
