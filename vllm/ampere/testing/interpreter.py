# SPDX-License-Identifier: Apache-2.0
"""Repair of the interpreter of Triton 3.8, for tests.

As released it truncates float32 to bfloat16 in place of rounding, multiplies the bit patterns of bfloat16 operands in
`tl.dot`, misreads NaN and subnormal codes of fp8, and does not saturate: all without an error. After `repair()` the
casts are torch's and dots are float32 matrix products. Not repaired: bfloat16 arithmetic without an upcast (kernels
must not do it), and encoding to fp8e4b15.
"""

import numpy
import torch

_INTEGERS = {8: (numpy.uint8, torch.uint8), 16: (numpy.uint16, torch.int16), 32: (numpy.uint32, torch.int32)}


def _fp8e4b15_to_float(codes: numpy.ndarray) -> torch.Tensor:
    """Bias 15, no infinity, no NaN."""
    codes = torch.from_numpy(codes.astype(numpy.int32))
    exponent, mantissa = codes >> 3 & 15, (codes & 7).float()
    magnitude = torch.where(exponent == 0, mantissa * 2.0**-17, torch.ldexp(1 + mantissa / 8, exponent - 15))
    return torch.where(codes & 0x80 != 0, -magnitude, magnitude)


def repair() -> None:
    """Mend the interpreter of this process. Needs TRITON_INTERPRET=1 set before Triton is imported."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    released = interpreter._convert_float

    def convert(values, source, target, rounding):
        exact = target in dtypes and (source in dtypes or source == tl.float8e4b15)
        if not exact or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return released(values, source, target, rounding)
        integer, view = _INTEGERS[source.primitive_bitwidth]
        bits = numpy.array(values).reshape(-1).view(integer)
        if source == tl.float8e4b15:
            numbers = _fp8e4b15_to_float(bits)
        else:
            numbers = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(view).view(dtypes[source]).float()
        if target == tl.float8e4nv:
            numbers = numbers.clamp(-448, 448)
        integer, view = _INTEGERS[target.primitive_bitwidth]
        return numbers.to(dtypes[target]).view(view).numpy().view(integer).reshape(numpy.shape(values))

    def operand(tensor):
        scalar = tensor.dtype.scalar
        if scalar == tl.bfloat16 or (scalar.is_floating() and scalar.primitive_bitwidth == 8):
            return convert(tensor.data, scalar, tl.float32, None).view(numpy.float32)
        return tensor.data

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = numpy.matmul(operand(a), operand(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
