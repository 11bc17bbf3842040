"""Runs the Metal kernels that MLX would compile, on the CPU, by Metal's rules: where there is no Apple GPU.

`capture` asks MLX for the source that it would hand to Metal's compiler, header, signature and all; `frontend` checks
its address spaces and conversions; `build` translates and compiles it; `memory` gives each buffer pages of its own,
with nothing on either side; `launch` runs the grid; `kernels` takes the place of `mx.fast.metal_kernel`, `shaders` that
of `torch.mps.compile_shader`, and `install` puts them there.

In C++, `fibers.h` are the threads, `schedule.h` says which runs next, `state.h` has their threadgroup and its memory,
and `runtime.cpp` the barriers, collectives and faults that a kernel meets. `include/` is Metal's standard library, as
far as it is used, for running; `frontend_include/` is the same for checking types. What an Apple GPU's compiler and
clock make of a kernel, no emulator says.
"""
