# SPDX-License-Identifier: Apache-2.0
"""What Triton made of the operands of a kernel's matrix products."""

import re


def assert_decoded_before_the_exchange(layouts: str) -> None:
    """No operand is computed in a product's own layout, where every warp decodes the whole tile, once for each product.

    Args:
        layouts: TTGIR of a kernel (`compile_check.Built.layouts`).
    """
    # Two halves in a register: operands are loaded as matrices, without bank conflicts.
    assert set(re.findall(r"dot_op<.*?kWidth = (\d+)", layouts)) == {"2"}
    operands = [line for line in layouts.splitlines() if "dot_op<" in line]
    assert not [line for line in operands if re.search(r" = (arith|tt\.join|tt\.reshape)", line)]
