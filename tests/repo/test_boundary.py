# SPDX-License-Identifier: Apache-2.0
"""Who may import what, and who may read the environment."""

import ast
import subprocess
import sys

import pytest

from tests.repo.checkout import OVERLAY, ROOT, imported, modules, tree

# Run before anything is installed.
SCRIPTS = ("archive.py", "environment.py", "demo.py")
# Variables that programs of every kind honour, and one of vLLM's that it overrides.
CONVENTIONS = ("NO_COLOR", "XDG_CACHE_HOME", "VLLM_WORKER_MULTIPROC_METHOD")
# What the console command imports before it knows what is asked of it.
LIGHT = ("errors", "envs", "cli.main")


def test_imported_names_are_resolved(tmp_path, monkeypatch):
    """The walk itself: relative imports that leave the overlay are seen."""
    source = "from ...platforms import cuda\nfrom . import rope\nimport vllm.v1\nimportlib.import_module('vllm.envs')\n"
    path = OVERLAY.relative_to(ROOT) / "kernels" / "imagined.py"
    monkeypatch.setattr("tests.repo.checkout.tree", lambda _: ast.parse(source))
    assert imported(path) == ["vllm.platforms.cuda", "vllm.ampere.kernels.rope", "vllm.v1", "vllm.envs"]


@pytest.mark.parametrize("path", modules(), ids=str)
def test_only_integration_imports_vllm(path):
    if "integration" in path.parts:
        return
    upstream = [n for n in imported(path) if n.split(".")[0] == "vllm" and n.split(".")[:2] != ["vllm", "ampere"]]
    ours = [n for n in imported(path) if n.startswith("vllm.ampere.integration")]
    assert not upstream + ours


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_need_the_standard_library_only(name):
    beside = {"vllm", *(script.removesuffix(".py") for script in SCRIPTS), "errors"}
    foreign = {n.split(".")[0] for n in imported(OVERLAY.relative_to(ROOT) / name)} - sys.stdlib_module_names - beside
    assert not foreign


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_on_pythons_that_they_refuse(name):
    ast.parse((OVERLAY / name).read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("module", LIGHT)
def test_console_starts_without_torch_and_without_running_vllm(module):
    code = (
        "import sys; sys.modules.update(torch=None, triton=None, numpy=None)\n"
        "import types; parent = types.ModuleType('vllm'); parent.__path__ = ['vllm']; sys.modules['vllm'] = parent\n"
        f"import vllm.ampere.{module}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", modules(), ids=str)
def test_environment_variables_are_read_in_one_module(path):
    """Elsewhere `os.environ` is only handed to a child process, whole, or written to."""
    if path.name == "envs.py":
        return
    reads = []
    parents = {child: node for node in ast.walk(tree(path)) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node) in ("os.getenv", "getenv", "environ"):
            reads.append(node.lineno)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "os.environ":
            parent = parents[node]
            whole = isinstance(parent, ast.Dict) or ast.unparse(parent) in (
                "os.environ.items",
                "os.environ.copy",
                "dict(os.environ)",
            )
            written = ast.unparse(parent) in ("os.environ.update", "os.environ.setdefault") or (
                isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
            )
            if not whole and not written:
                reads.append(node.lineno)
    assert not reads, f"lines {reads}: put it into envs.py"


def test_our_variables_carry_our_prefix():
    reads = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(tree(OVERLAY.relative_to(ROOT) / "envs.py"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get"
    ]
    assert reads and all(name.startswith("VLLM_AMPERE_") or name in CONVENTIONS for name in reads), reads
