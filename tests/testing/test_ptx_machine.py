# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: instructions against numbers worked out apart, and each fault that it must raise."""

import struct

import pytest
import torch

from vllm.ampere.testing.ptx_machine import MachineFault, run

HEAD = """.visible .entry k(.param .u64 p_param_0, .param .u64 p_param_1, .param .u64 p_param_2, .param .u64 p_param_3)
.reqntid {threads}
{{
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd1, %r1, {stride};
	ld.param.b64 %rd2, [p_param_0];
	ld.param.b64 %rd3, [p_param_1];
	add.s64 %rd4, %rd2, %rd1;
	add.s64 %rd5, %rd3, %rd1;
"""


def block(body: str, source: torch.Tensor, out: torch.Tensor, threads: int = 32, shared_bytes: int = 2048, stride: int = 4) -> torch.Tensor:
    """Run one block; %rd4 and %rd5 are each thread's place in `source` and `out`."""
    run(HEAD.format(threads=threads, stride=stride) + body + "\nret;\n}\n", (1,), [source, out], shared_bytes=shared_bytes)
    return out


def each(instructions: str, *operands: int | float) -> int:
    """What thread 0 leaves in %r9 (or %f, by its bits) after instructions on %r2, %r3, %r4."""
    words = [bits(x) if isinstance(x, float) else x % 2**32 for x in operands]
    source = torch.tensor(words + [0] * (128 - len(words)), dtype=torch.uint32)
    loads = "\n".join(f"ld.global.b32 {{ %r{2 + i} }}, [ %rd2 + {4 * i} ];" for i in range(len(words)))
    out = block(f"{loads}\n{instructions}\nst.global.b32 [ %rd5 + 0 ], {{ %r9 }};", source, torch.zeros(32, dtype=torch.int32))
    assert (out == out[0]).all()
    return int(out[0]) % 2**32


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


NAN = float("nan")


@pytest.mark.parametrize(
    "instructions, operands, want",
    [
        ("sub.s32 %r9, %r2, %r3;", (3, 5), 2**32 - 2),
        ("mad.lo.s32 %r9, %r2, %r3, %r4;", (-7, 100_000, 3), -699_997 % 2**32),
        ("mul.hi.s32 %r9, %r2, %r3;", (-(2**31), 6), -3 % 2**32),
        ("mul.hi.u32 %r9, %r2, %r3;", (-1, 16), 15),
        ("mul.wide.s32 %rd9, %r2, %r3;\nshr.u64 %rd8, %rd9, 32;\ncvt.u32.u64 %r9, %rd8;", (-5, 3), 2**32 - 1),
        ("cvt.s64.s32 %rd9, %r2;\nmul.hi.s64 %rd8, %rd9, 0x4000000000000000;\ncvt.u32.u64 %r9, %rd8;", (-9,), -3 % 2**32),
        ("rem.s32 %r9, %r2, %r3;", (-7, 3), 2**32 - 1),
        ("div.s32 %r9, %r2, %r3;", (-7, 3), 2**32 - 2),
        ("div.full.f32 %r9, %r2, %r3;", (1.0, 4.0), bits(0.25)),
        ("shl.b32 %r9, %r2, 33;", (5,), 0),
        ("shr.s32 %r9, %r2, 40;", (-8,), 2**32 - 1),
        ("shr.u32 %r9, %r2, 4;", (-16,), 0x0FFFFFFF),
        ("shf.l.wrap.b32 %r9, %r2, %r3, 8;", (0x11223344, 0x55667788), 0x66778811),
        ("shf.r.wrap.b32 %r9, %r2, %r3, 8;", (0x11223344, 0x55667788), 0x88112233),
        ("bfe.u32 %r9, %r2, 4, 8;", (0xABCDE,), 0xCD),
        ("bfe.s32 %r9, %r2, 4, 8;", (0xABCDE,), 0xFFFFFFCD),
        ("prmt.b32 %r9, %r2, %r3, 0x7150U;", (0x33221100, 0x77665544), 0x77115500),
        ("lop3.b32 %r9, %r2, %r3, %r4, 0xca;", (0xF0F0F0F0, 0x12345678, 0x9ABCDEF0), 0x1A3C5E70),
        ("min.s32 %r9, %r2, %r3;", (-1, 1), 2**32 - 1),
        ("min.u32 %r9, %r2, %r3;", (-1, 1), 1),
        ("max.f32 %r9, %r2, %r3;", (NAN, 2.0), bits(2.0)),
        ("setp.lt.f32 %p1, %r2, %r3;\nselp.b32 %r9, 1, 2, %p1;", (NAN, 2.0), 2),
        ("setp.ltu.f32 %p1, %r2, %r3;\nselp.b32 %r9, 1, 2, %p1;", (NAN, 2.0), 1),
        ("setp.ne.f32 %p1, %r2, %r2;\nselp.b32 %r9, 1, 2, %p1;", (NAN,), 2),
        ("setp.neu.f32 %p1, %r2, %r2;\nselp.b32 %r9, 1, 2, %p1;", (NAN,), 1),
        ("setp.lt.s32 %p1, %r2, 5;\nsetp.gt.and.s32 %p2, %r2, 3, %p1;\nselp.b32 %r9, 1, 2, %p2;", (4,), 1),
        ("setp.lt.s32 %p1, %r2, 5;\nnot.pred %p2, %p1;\nmov.u32 %r9, 7;\n@%p2 mov.u32 %r9, 8;\n@!%p1 mov.u32 %r9, 9;", (4,), 7),
        ("mul.f32 %r9, %r2, 0f40400000;", (2.5,), bits(7.5)),
        ("fma.rn.f32 %r9, %r2, %r3, %r4;", (1 + 2.0**-12, 1 + 2.0**-12, -1.0), bits(2.0**-11 + 2.0**-24)),
        ("ex2.approx.ftz.f32 %r9, %r2;", (-3.0,), bits(0.125)),
        # Ties go to the even number, in both directions, and a NaN stays one.
        ("cvt.rn.bf16x2.f32 %r9, %r2, %r3;", (1 + 2.0**-8, 1 + 3 * 2.0**-8), 0x3F803F82),
        ("cvt.rn.bf16x2.f32 %r9, %r2, %r3;", (-0.0, NAN), 0x80007FFF),
        ("mov.b32 {_, %rs1}, %r2;\nmov.b32 {%rs2, _}, %r3;\nmov.b32 %r9, {%rs1, %rs2};", (0x11112222, 0x33334444), 0x44441111),
        ("cvt.rzi.s32.f32 %r9, %r2;", (-2.75,), 2**32 - 2),
        ("shfl.sync.bfly.b32 %r8, %r1, 5, 31, -1;\nsub.s32 %r7, %r8, %r1;\nxor.b32 %r6, %r1, 5;\nsub.s32 %r9, %r6, %r8;", (0,), 0),
        ("redux.sync.add.s32 %r9, %r1, -1;", (0,), 496),
    ],
)  # fmt: skip
def test_an_instruction(instructions, operands, want):
    assert each(instructions, *operands) == want


def test_a_loop_counts():
    body = "mov.u32 %r9, 0;\n$L__a:\nadd.s32 %r9, %r9, 3;\nsetp.lt.s32 %p1, %r9, 20;\n@%p1 bra $L__a;"
    assert each(body) == 21


STORE = "st.shared.b32 [ %r2 + 0 ], { %r1 };\n"
OTHER = "xor.b32 %r5, %r1, 32;\nshl.b32 %r6, %r5, 2;\nmov.u32 %r7, global_smem;\nadd.s32 %r7, %r7, %r6;\n"
PLACE = "shl.b32 %r3, %r1, 2;\nmov.u32 %r4, global_smem;\nadd.s32 %r2, %r4, %r3;\n" + OTHER
LEAVE = "st.global.b32 [ %rd5 + 0 ], { %r9 };"


def test_warps_exchange_through_shared_memory():
    body = PLACE + STORE + "bar.sync 0;\nld.shared.b32 %r9, [%r7];\n" + LEAVE
    got = block(body, torch.zeros(64), torch.zeros(64, dtype=torch.int32), 64)
    assert got.tolist() == [i ^ 32 for i in range(64)]


COPY = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd4 + 0 ], 0x4, %r8;\ncp.async.commit_group;\n"


@pytest.mark.parametrize(
    "body, words",
    [
        (STORE + "ld.shared.b32 %r9, [%r7];", "another warp wrote"),
        (STORE + "bar.sync 0;\nld.shared.b32 %r9, [%r7];\n" + STORE, "another warp read"),
        (STORE + "st.shared.b32 [ %r7 + 0 ], { %r1 };", "written by two warps"),
        ("ld.shared.b32 %r9, [%r2];", "never written"),
        ("ld.shared.b32 %r9, [%r2+2000];", "shared memory has 2048 bytes"),
        (COPY + "ld.shared.b32 %r9, [%r2];", "may still write|never written"),
        (STORE + COPY + "bar.sync 0;\nld.shared.b32 %r9, [%r2];", "may still write"),
        (COPY + "cp.async.wait_group 1;\nbar.sync 0;\nld.shared.b32 %r9, [%r2];", "may still write|never written"),
        (COPY + "cp.async.wait_group 0;\nld.shared.b32 %r9, [%r7];", "another warp wrote"),
        (STORE + "bar.sync 0;\nld.shared.b32 %r9, [%r7];\n" + COPY, "another warp read"),
        ("ld.global.b32 { %r9 }, [ %rd4 + 4 ];", "outside the given tensors"),
        ("st.global.b32 [ %rd5 + -4 ], { %r1 };", "outside the given tensors"),
        ("ld.global.b32 { %r9 }, [ %rd4 + 2 ];", "not aligned"),
        ("setp.lt.s32 %p1, %r1, 3;\n@%p1 bra $L__a;\n$L__a:", "threads part"),
        ("vote.sync.any.pred %p1, %p2, -1;", "does not know"),
        ("ld.shared.b32 %r9, [%r99];", "%r99"),
        ("mov.u16 %rs1, 5;\nadd.bf16 %rs2, %rs1, %rs1;", "arithmetic of bfloat16: add.bf16"),
        ("mul.bf16x2 %r9, %r1, %r1;", "mul.bf16x2"),
    ],
)
def test_a_fault_is_raised(body, words):
    with pytest.raises(MachineFault, match=words):
        block(PLACE + "mov.u32 %r8, 4;\n" + body, torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), 64)


def test_an_asynchronous_copy_arrives_at_its_wait_and_a_part_not_taken_is_zero():
    source = torch.arange(100, 164, dtype=torch.int32)
    body = "setp.lt.s32 %p1, %r1, 40;\nselp.b32 %r8, 4, 0, %p1;\n" + COPY + "cp.async.wait_group 0;\nbar.sync 0;\nld.shared.b32 %r9, [%r7];\n"
    got = block(PLACE + body + LEAVE, source, torch.full((64,), 7, dtype=torch.int32), 64)
    assert got.tolist() == [100 + (i ^ 32) if i ^ 32 < 40 else 0 for i in range(64)]


def test_a_masked_access_may_point_anywhere():
    body = "setp.lt.s32 %p1, %r1, 0;\nmov.u32 %r9, 5;\n@%p1 ld.global.b32 { %r9 }, [ %rd4 + 4096 ];\n" + LEAVE
    assert (block(body, torch.zeros(32), torch.zeros(32, dtype=torch.int32)) == 5).all()


def test_views_share_a_storage_and_keep_what_is_beside_them():
    whole = torch.arange(96, dtype=torch.int32)
    block("ld.global.b32 { %r9 }, [ %rd4 + 0 ];\n" + LEAVE, whole[:32], whole[64:])
    assert whole.tolist() == [*range(64), *range(32)]


def test_another_number_of_arguments_is_refused():
    with pytest.raises(MachineFault, match="takes 2 arguments, 1 are given"):
        run(HEAD.format(threads=32, stride=4) + "ret;\n}\n", (1,), [torch.zeros(1)], shared_bytes=0)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matrices_are_multiplied(dtype):
    """One warp: `ldmatrix` of 16 x 16 and, transposed, of 16 x 8, then `mma.sync`, against PyTorch."""
    numbers = torch.float16 if dtype == "f16" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 16, generator=generator).to(numbers), torch.randn(16, 8, generator=generator).to(numbers)
    source = torch.cat([a.flatten(), b.flatten()])
    fill = "\n".join(
        f"ld.global.b32 {{ %r3 }}, [ %rd4 + {128 * i} ];\nst.shared.b32 [ %r2 + {128 * i} ], {{ %r3 }};" for i in range(6)
    )
    body = f"""shl.b32 %r10, %r1, 2;
mov.u32 %r11, global_smem;
add.s32 %r2, %r11, %r10;
{fill}
bar.sync 0;
and.b32 %r12, %r1, 15;
shl.b32 %r13, %r12, 5;
and.b32 %r14, %r1, 16;
add.s32 %r15, %r13, %r14;
add.s32 %r16, %r11, %r15;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r16];
shl.b32 %r17, %r12, 4;
add.s32 %r18, %r11, %r17;
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r24, %r25}}, [%r18+512];
mov.u32 %r30, 0; mov.u32 %r31, 0; mov.u32 %r32, 0; mov.u32 %r33, 0;
mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{ %r30, %r31, %r32, %r33 }}, {{ %r20, %r21, %r22, %r23 }}, {{ %r24, %r25 }}, {{ %r30, %r31, %r32, %r33 }};
st.global.v4.b32 [ %rd5 + 0 ], {{ %r30, %r31, %r32, %r33 }};""".replace("; mov", ";\nmov")
    body = body.replace("[ %rd4 + ", "[ %rd7 + ")
    place = "shl.b32 %r40, %r1, 2;\ncvt.u64.u32 %rd6, %r40;\nadd.s64 %rd7, %rd2, %rd6;\n"
    out = block(place + body, source, torch.zeros(32, 4), stride=16)
    got = torch.empty(16, 8)
    for lane in range(32):
        for i in range(4):
            got[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = out[lane, i]
    torch.testing.assert_close(got, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
