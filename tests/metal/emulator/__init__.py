"""Runs the Metal kernels that MLX would compile, on the CPU, by Metal's rules: where there is no Apple GPU.

`capture` asks MLX for the source that it would hand to Metal's compiler, header, signature and all; `frontend` checks
its address spaces and conversions; `build` translates and compiles it with g++; `memory` gives each buffer pages of its
own, with nothing on either side; `launch` runs the grid; `kernels` takes the place of `mx.fast.metal_kernel`.
`runtime.cpp` has the threads of a threadgroup as fibers, barriers, SIMD-group collectives and threadgroup memory;
`include/` is Metal's standard library as far as it is used. What an Apple GPU's compiler and clock make of a kernel, no
emulator says.
"""
