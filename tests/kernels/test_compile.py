# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel, built for sm_80 and sm_86 as a real launch would build it."""

import dataclasses
import importlib
import pkgutil
import types

import pytest

from tests.repo.checkout import ROOT
from vllm.ampere import kernels, upstream
from vllm.ampere.errors import AmpereError
from vllm.ampere.kernels.launch import Launch, tl, triton, unavailable
from vllm.ampere.testing import kernel_table
from vllm.ampere.testing.compile_check import Built, all_launches, build, faults

pytestmark = [pytest.mark.compile, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
ARCHITECTURES = ("sm80", "sm86")
LAUNCHES = all_launches()


COMPILED_BY, DOCUMENTED = kernel_table.parsed((ROOT / "docs" / "en" / "kernels.md").read_text())


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_kernel_fits_and_is_documented(launch):
    """Figures are compared where this environment's compilers are the document's, as those of `make test` are."""
    seen = kernel_table.row(launch)
    assert not seen.pop("faults")
    (documented,) = (r for r in DOCUMENTED if {n: r[n] for n in kernel_table.IDENTITY} == kernel_table.identity(launch))
    assert COMPILED_BY != kernel_table.compilers() or documented == seen, "run `make kernel-table`"


def test_the_document_has_no_other_rows():
    assert len(DOCUMENTED) == len(LAUNCHES)
    assert COMPILED_BY.startswith(f"Triton {upstream.pins()['cpu']['triton']}, ")


def test_a_document_is_updated_between_its_markers():
    text = (ROOT / "docs" / "en" / "kernels.md").read_text()
    other = kernel_table.updated(text, kernel_table.markdown(DOCUMENTED[:1], "Triton 0"))
    assert kernel_table.parsed(other) == ("Triton 0", DOCUMENTED[:1])
    assert kernel_table.updated(other, kernel_table.markdown(DOCUMENTED, COMPILED_BY)) == text
    with pytest.raises(AmpereError, match="no place for the table"):
        kernel_table.updated("", "")


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_declared_divisibility_is_that_of_a_launch(launch):
    """Triton does not look at what a kernel says not to specialise."""
    for parameter in launch.kernel.params:
        blind = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        assert not (blind and launch.signature.get(parameter.name, "").endswith(":16")), parameter.name


def test_every_module_with_kernels_lists_their_launches():
    """By name in the module of a `@triton.jit` function that ends in `_kernel`."""
    listed = {(launch.kernel.__module__, launch.kernel.__name__) for launch in LAUNCHES}
    written = {
        (module.name, name)
        for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, triton.runtime.JITFunction) and value.__module__ == module.name
        if name.endswith("_kernel")
    }
    assert written and not written - listed


def tuned(*modules) -> list[str]:
    """Kernels that Triton would choose a configuration for by timing them."""
    return [f"{module.__name__}.{name}" for module in modules for name, value in vars(module).items()
            if isinstance(value, triton.runtime.Autotuner)]


def test_no_kernel_is_tuned_by_time():
    """Ranks, and one start after another, run the same binary."""
    found = [importlib.import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")]
    assert len(found) > 20 and not tuned(*found)
    assert tuned(types.SimpleNamespace(__name__="m", k=triton.autotune([triton.Config({})], [])(_cast_kernel))) == ["m.k"]


@triton.jit
def _cast_kernel(x_ptr, TO: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    tl.store(x_ptr + tl.arange(0, 32), x.to(TO).to(tl.float32))


@triton.jit
def _product_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)).to(tl.bfloat16))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8_type_is_refused(architecture):
    with pytest.raises(triton.compiler.errors.CompilationError, match="fp8e4nv not supported"):
        build(Launch(_cast_kernel, {"x_ptr": "*fp32:16"}, {"TO": tl.float8e4nv}), architecture)


def test_shared_memory_and_spills_are_measured():
    """A product whose operands and result one warp cannot hold."""
    launch = Launch(_product_kernel, {"x_ptr": "*bf16:16", "y_ptr": "*bf16:16"}, {"SIZE": 128}, num_warps=1)
    built = build(launch, "sm86")
    assert built.shared_bytes >= 2 * 128 * 128 * 2 and built.registers > 100
    assert min(built.spill_store_bytes, built.spill_load_bytes) > 0
    assert len(faults(launch, built, "sm86")) == 2


def test_each_fault_is_named():
    launch = Launch(_cast_kernel, {}, spill_bytes=16)
    fine = Built("", 49_152, 255, 16, 16)
    assert faults(launch, fine, "sm86") == []
    for change, words in (
        ({"shared_bytes": 101_377}, "sm86 has 101376"),
        ({"shared_bytes": 49_153}, "without a listed reason"),
        ({"spill_load_bytes": 17}, "17 bytes of registers spilled, 16 listed"),
        ({"ptx": "wgmma.mma_async"}, "an instruction that Ampere lacks"),
    ):
        (fault,) = faults(launch, dataclasses.replace(fine, **change), "sm86")
        assert words in fault
    listed = dataclasses.replace(launch, shared_reason="holds both tiles")
    assert faults(listed, dataclasses.replace(fine, shared_bytes=101_376), "sm86") == []
