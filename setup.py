# SPDX-License-Identifier: Apache-2.0
"""Build `vllm-ampere`: the overlay `vllm/ampere` with the patch series and the pins as its data."""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DATA = "vllm/ampere/_shipped"


class BuildWithData(build_py):
    """`build_py` that also copies `upstream.toml` and `patches/` into the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for source, target in self._data():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode=True):
        return super().get_outputs(include_bytecode) + [str(target) for _, target in self._data()]

    def _data(self):
        sources = [ROOT / "upstream.toml", *sorted((ROOT / "patches").glob("*"))]
        return [(source, Path(self.build_lib, DATA) / source.relative_to(ROOT)) for source in sources]


# vLLM and torch are not required: the package serves the ones at hand, and parts of it run without either.
setup(
    packages=find_namespace_packages(include=["vllm.ampere", "vllm.ampere.*"]),
    package_data={"vllm.ampere": ["**/*.json", "**/*.toml"]},
    py_modules=["vllm_ampere"],
    cmdclass={"build_py": BuildWithData},
)
