"""Triton's interpreter, with the float rounding of the GPU, and with scalars in masks.

``triton.runtime.interpreter._convert_float`` rounds the mantissa on its own: a carry out of the mantissa is OR-ed into
the exponent and is lost for every odd exponent, which makes about 2.5% of fp8 bytes wrong, some by half. It truncates
where no rounding mode is given, as for fp32 to bf16, and it does not saturate. The GPU rounds to nearest even, and
saturates for e4m3. torch's own conversions do that on a CPU, so fp32 conversions are handed to torch.

A comparison keeps the type of what it compares, and ``create_splat`` makes integers of it: a mask that a condition on a
scalar is part of is then refused.
"""

from __future__ import annotations

from typing import Any

import torch

FP8_MAX = 448.0

_installed = False


def install() -> None:
    """Replace the interpreter's fp32 -> fp8 e4m3 and fp32 -> bf16 conversions and its splat. Idempotent."""
    global _installed
    if _installed:
        return
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as triton_interpreter

    stock = triton_interpreter._convert_float
    nearest = (None, triton_interpreter._ir.ROUNDING_MODE.RTNE)
    targets = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16}

    def convert_float(data: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        """``data`` as raw bits of ``output_dtype``, in the shape of ``data``."""
        if input_dtype != tl.float32 or output_dtype not in targets or rounding_mode not in nearest:
            return stock(data, input_dtype, output_dtype, rounding_mode)
        values = torch.from_numpy(np.array(data).view(np.float32))
        if output_dtype == tl.float8e4nv:
            return to_fp8(values).view(torch.uint8).numpy().reshape(data.shape)
        return values.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)

    splat = triton_interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        """``arg`` in every element of a block; booleans stay booleans."""
        block = splat(self, ret_ty, arg)
        if arg.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    triton_interpreter._convert_float = convert_float
    triton_interpreter.InterpreterBuilder.create_splat = create_splat
    _installed = True


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> fp8 e4m3 as the GPU's ``cvt.rn.satfinite``: nearest even, saturating at 448; NaN stays NaN.

    torch 2.13 saturates by itself (earlier releases made NaN of large values); a test holds it to that.
    """
    return values.to(torch.float8_e4m3fn)
