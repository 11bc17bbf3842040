"""An emulator that runs the Metal kernels on the CPU by Metal's rules, for machines without an Apple GPU.

`capture` gets the complete source that MLX would pass to Metal's compiler. `frontend` checks its address spaces and
conversions. `build` translates and compiles it. `memory` gives each buffer its own pages between guard pages. `launch`
runs the grid. `kernels` replaces `mx.fast.metal_kernel`, `shaders` replaces `torch.mps.compile_shader`, and `install`
installs both.

In C++, `fibers.h` implements the threads, `schedule.h` chooses the next thread, `state.h` has the threadgroup and its
memory, and `runtime.cpp` has barriers, collective operations and faults. `include/` is the part of Metal's standard
library that is used, for execution; `frontend_include/` is the same for type checks. The emulator cannot show what
Apple's compiler accepts, nor the speed of a kernel.
"""
