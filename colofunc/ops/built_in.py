"""All kernels of this project, of every operator that has some."""

from __future__ import annotations

from colofunc.ops import attention, experts_guards, fp8, fp8_products, int8_products, random
from colofunc.ops.kernels import Kernel

CUDA_KERNELS: tuple[Kernel, ...] = (
    *attention.CUDA_KERNELS,
    *random.CUDA_KERNELS,
    *experts_guards.CUDA_KERNELS,
    *fp8.CUDA_KERNELS,
    *fp8_products.CUDA_KERNELS,
    *int8_products.CUDA_KERNELS,
)
