# SPDX-License-Identifier: Apache-2.0
"""Kernels: are they right, and how far are they from their rivals and from what the card can do?

    python benchmarks/bench_kernels.py [--set 1|2|3|4|5|6] [--only OP] [--output RECEIPT]

Every op with a Triton implementation first runs its own cases against the reference. Each shape of shapes.py is then
compared with the reference, and only if it agrees is it timed, beside its rivals, as vllm/ampere/testing/timing.py
says. A card newer than Ampere runs sm_80 code of ours and its own of the rivals.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks import floor, receipt, rivals  # noqa: E402
from benchmarks.shapes import ERROR, FLOOR, MMA, Shape, all_shapes  # noqa: E402
from vllm.ampere import arch  # noqa: E402
from vllm.ampere.kernels.registry import Op, all_ops  # noqa: E402
from vllm.ampere.testing.compare import assert_close, difference  # noqa: E402
from vllm.ampere.testing.inputs import duplicate  # noqa: E402
from vllm.ampere.testing.parity import assert_parity, produce  # noqa: E402
from vllm.ampere.testing.timing import EagerCalls, GraphReplay, launches, race, rotation_count, spread  # noqa: E402

# Ops whose error is counted against float64; their references compute so on request.
FLOAT64 = ("sparse_mla_decode", "sparse_mla_prefill", "sparse_mla_rows")
# A reference with more work than this runs on the card.
CARD_FLOPS = 2e10
# How far a rival may be from the reference and still count as doing the same work.
RIVAL_RELATIVE_NORM = 2e-2
SETS = {
    1: ("sparse_mla_decode", "sparse_mla_rows", "sparse_mla_prefill", "merge_attn_states", "gather_dequant",
        "gather_dequant_slots", "window_insert", "compressor_insert"),
    2: ("mhc_pre", "mhc_post", "mhc_collapse", "mhc_post_pre"),
    3: ("combine_topk_swa", "topk_slots", "window_slots", "mqa_logits", "paged_mqa_logits", "candidate_mqa_logits",
        "candidate_blocks", "mask_to_candidates", "select_topk", "query_rope_quant", "key_norm_rope_store"),
    4: ("clamped_swiglu", "mxfp4_experts_decode"),
    5: ("markov_sampler",),
    6: ("engram_lookup",),
}  # fmt: skip


@dataclass
class Findings:
    """What a run found; `figures` and `samples` as receipts hold them."""

    figures: list[dict] = field(default_factory=list)
    samples: dict = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    checked: int = 0

    def add(self, figure: str, value: float, unit: str, **more) -> None:
        self.figures.append({"id": figure, "value": float(f"{value:.4g}"), "unit": unit} | more)


def implemented(op: Op, architecture: str):
    """Our Triton implementation for an architecture, or None."""
    found = [i for i in op.implementations if i.name == "triton" and architecture in i.architectures]
    return found[0].function if found else None


@contextlib.contextmanager
def lowered_for(architecture: str, native: bool):
    """Triton compiles and our launchers decide for `architecture`; on a card of that architecture, nothing changes."""
    names = () if native else ("TRITON_OVERRIDE_ARCH", "VLLM_AMPERE_ASSUME")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(dict.fromkeys(names, architecture))
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def check_cases(op: Op, function, findings: Findings, device: str = "cuda") -> None:
    """Each case of the op against the reference on the CPU; a difference is a failure of the op."""
    for case in op.cases:
        try:
            got = produce(op, function, case.inputs(1, device))
            assert_parity(op, got, produce(op, op.reference, case.inputs(1)), f"{op.name} {case.name}")
        except Exception as error:  # a kernel may fail in any way; the others still run
            findings.failures[f"{op.name}/{case.name}"] = f"{type(error).__name__}: {error}".splitlines()[0]
        findings.checked += 1


def check_shape(op: Op, function, shape: Shape, device: str = "cuda") -> tuple[float, torch.Tensor]:
    """Compare with the reference on fresh inputs.

    Returns:
        relative error of the first tensor that the op returns or writes, and the reference's, on the device.

    Raises:
        AssertionError: outside the op's tolerance.
    """
    where = device if op.flops(shape.case.sizes) > CARD_FLOPS else "cpu"
    got = produce(op, function, shape.case.inputs(0, device))
    given = shape.case.inputs(0, where)
    exact = {"dtype": torch.float64} if op.name in FLOAT64 else {}
    want = produce(op, lambda **inputs: op.reference(**inputs, **exact), given)
    for name, tensor in got.items():
        assert_close(tensor, want[name].to(device), op.tolerances[name], f"{shape.figure} {name}")
    first = next(iter(got))
    reference = want[first].to(device)
    return difference(got[first], reference).relative_norm, reference


def measure(shape: Shape, findings: Findings, check, time) -> bool:
    """Check, then time; a shape that fails its check leaves a failure and no figure.

    Args:
        check: () -> relative error, reference; AssertionError if it is too large.
        time: (relative error, reference) -> None; adds figures.
    """
    try:
        time(*check())
    except Exception as error:  # as in check_cases
        findings.figures = [f for f in findings.figures if not f["id"].startswith(f"{shape.figure}/")]
        findings.samples.pop(shape.figure, None)
        findings.failures[shape.figure] = f"{type(error).__name__}: {error}".splitlines()[0]
        return False
    return True


def same_work(op: Op, result: torch.Tensor, want: torch.Tensor, given) -> float:
    """Relative norm between a rival's result and the reference; chosen rows are compared by their scores."""
    if op.name == "select_topk":
        result, want = (given["scores"].gather(1, rows.long()).sort().values for rows in (result, want))
    return difference(result, want).relative_norm


def time_shape(
    op: Op, function, shape: Shape, error, reference, ceilings, ours, findings: Findings, device: str = "cuda"
) -> None:
    """Time a shape beside its rivals, and add its figures."""
    sizes = shape.case.sizes
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    timed = EagerCalls if shape.eager else GraphReplay
    sets = rotation_count(op.bytes_moved(sizes), l2_bytes)
    # A cache knows addresses, not values, so copies do; drawing each set anew took most of a run. Host memory is not copied.
    inputs = [shape.case.inputs(0, device)]
    inputs += [shape.case.inputs(n, device) if shape.link_bytes else duplicate(inputs[0]) for n in range(1, sets)]
    own = [lambda given=given: function(**given) for given in inputs]
    with ours():
        replays = {"ours": timed(own)}
        count = launches(own[0])
    against = {}
    for rival in rivals.rivals_of(op.name, shape.rivals):
        if reason := rival.requires():
            findings.absent[f"{shape.figure}: {rival.name}"] = reason
            continue
        with ours() if rival.lowered_like_ours else contextlib.nullcontext():
            try:
                prepared = [rival.prepare(given) for given in inputs]
                call, result = prepared[0]
                returned = call()
                off = same_work(op, result(returned), reference, inputs[0]) if result else 0.0
                assert off <= RIVAL_RELATIVE_NORM, f"its result is off by {off:.1e}"
                replays[rival.name] = timed([call for call, _ in prepared])
            except Exception as fault:  # it is upstream's, and this card may be none of its own
                reason = f"{type(fault).__name__}: {fault}".splitlines()[0]
                findings.absent[f"{shape.figure}: {rival.name}"] = reason
                continue
        against[rival.name] = rival.against
    samples = race(replays)
    findings.samples[shape.figure] = samples
    add_figures(shape, op, {n: spread(s) for n, s in samples.items()}, against, error, count, ceilings, findings)


def add_figures(shape, op, spreads, against, error, count, ceilings, findings: Findings) -> None:
    """The figures of one shape, from the spreads of ours and of its rivals.

    Args:
        against: rival -> last word of its figure.
        count: launches of one call, or None.
        ceilings: copy_bytes_per_s, host_copy_bytes_per_s and mma_flops_per_s.
    """
    ours, sizes = spreads["ours"], shape.case.sizes
    findings.add(f"{shape.figure}/time", ours.median_us, "us", p10=ours.p10_us, p90=ours.p90_us)
    if count is not None:
        findings.add(f"{shape.figure}/launches", count, "per call")
    for word in dict.fromkeys(against.values()):
        best = min(spreads[name].median_us for name in against if against[name] == word)
        findings.add(f"{shape.figure}/vs-{word}", best / ours.median_us, "x")
    seconds = ours.median_us * 1e-6
    if FLOOR in shape.measures:
        if shape.link_bytes:
            floor_s = shape.link_bytes / ceilings["host_copy_bytes_per_s"]
        else:
            floor_s = op.bytes_moved(sizes) / ceilings["copy_bytes_per_s"]
        findings.add(f"{shape.figure}/{FLOOR}", floor_s / seconds, "fraction")
    if MMA in shape.measures:
        floor_s = op.flops(sizes) / ceilings["mma_flops_per_s"]
        findings.add(f"{shape.figure}/{MMA}", floor_s / seconds, "fraction")
    if ERROR in shape.measures:
        findings.add(f"{shape.figure}/{ERROR}", error, "relative")


def selected(number: int | None, only: list[str] | None) -> list[Op]:
    """The ops asked for by name, or those of a set, or all."""
    return [all_ops()[name] for name in only or SETS.get(number) or all_ops()]


def matching(patterns: list[str]) -> list[Shape]:
    """The shapes whose names match one of the patterns of a shell."""
    return [shape for shape in all_shapes() if any(fnmatch(shape.figure, pattern) for pattern in patterns)]


def run(ops: list[Op], shapes: list[Shape], told: Callable[[Findings, str], None]) -> Findings:
    """Check and time.

    Args:
        ops: in this order; those without one of the shapes are checked only.
        shapes: in this order.
        told: called after each shape, and at the end, with what was found so far and which code ran on which card.
    """
    native = torch.cuda.get_device_capability() < (8, 9)
    architecture = arch.of_device("cuda").name if native else "sm80"
    for name in () if native else ("TRITON_OVERRIDE_ARCH", "VLLM_AMPERE_ASSUME"):
        os.environ.pop(name, None)  # rivals run as upstream runs them

    def ours():
        return lowered_for(architecture, native)

    alike = ", ".join(rival.name for rival in rivals.RIVALS if rival.lowered_like_ours)
    card = torch.cuda.get_device_name()
    scope = f"{architecture} code of ours on {card}, and of {alike}; the other rivals compiled for the card"
    findings = Findings()
    ceilings, findings.samples["ceilings"] = floor.measure(ours)
    for name, value in ceilings.items():
        findings.add(f"ceilings/{architecture}/{name}", value, name.split("_", 1)[1].replace("_per_", "/"))
    for op in ops:
        function = implemented(op, architecture)
        if function is None:
            findings.absent[op.name] = f"no Triton implementation for {architecture}"
            continue
        with ours():
            check_cases(op, function, findings)
        for shape in shapes:
            if shape.op == op.name:
                def check(op=op, function=function, shape=shape):
                    with ours():
                        return check_shape(op, function, shape)

                def time(error, reference, op=op, function=function, shape=shape):
                    time_shape(op, function, shape, error, reference, ceilings, ours, findings)

                done = measure(shape, findings, check, time)
                print(f"{shape.figure}: {'timed' if done else 'FAILED'}", file=sys.stderr)
                told(findings, scope)
    told(findings, scope)
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set", type=int, choices=sorted(SETS),
        help="1 sparse MLA and gather, 2 mHC, 3 combine and indexer, 4 experts, 5 draft sampler, 6 engram",
    )
    parser.add_argument("--only", nargs="+", metavar="OP", choices=sorted(all_ops()), help="these ops")
    parser.add_argument("--shapes", nargs="+", metavar="PATTERN", help='these shapes, as "sparse_mla_decode/bs64-*"')
    parser.add_argument("--output", type=Path, help="receipt to write")
    arguments = parser.parse_args()
    chosen, ops = matching(arguments.shapes or ["*"]), selected(arguments.set, arguments.only)
    if arguments.shapes:
        ops = [op for op in ops if any(shape.op == op.name for shape in chosen)]
        if not ops:
            parser.error(f"no shape of these ops matches {' '.join(arguments.shapes)}")
    if not torch.cuda.is_available():
        print("error: there is no card to measure\nhint: run it where torch finds a GPU", file=sys.stderr)
        return 2
    printed: set[str] = set()

    def told(findings: Findings, scope: str) -> None:
        """Print what is new and write the receipt: a run that is cut keeps what it found."""
        for figure in findings.figures:
            if figure["id"] not in printed:
                print(f"{figure['value']:>12.6g}  {figure['unit']:<9} {figure['id']}", flush=True)
                printed.add(figure["id"])
        if arguments.output:
            failed = len(findings.failures)
            said = f"{findings.checked} cases and every shape against the reference in this run; failed: {failed}"
            samples = findings.samples | {"absent": findings.absent, "failures": findings.failures}
            receipt.write(arguments.output, "kernels", scope, said, findings.figures, samples)

    findings = run(ops, chosen, told)
    for name, reason in findings.absent.items():
        print(f"{'absent':>12}  {name}: {reason}")
    for name, reason in findings.failures.items():
        print(f"{'FAILED':>12}  {name}: {reason}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
