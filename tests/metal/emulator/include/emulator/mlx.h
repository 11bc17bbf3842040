// The names that MLX puts in front of every custom kernel, as far as kernels need them.
#pragma once

#include <metal_stdlib>

using namespace metal;

typedef bfloat bfloat16_t;
typedef half float16_t;
