// The names that MLX puts in front of every custom kernel and that one might collide with or lean on.
#pragma once

#include <metal_stdlib>

using namespace metal;

typedef bfloat bfloat16_t;
typedef half float16_t;

inline float log1p(float x) {
  float next = 1.0f + x;
  return next == 1.0f ? x : x * (metal::log(next) / (next - 1.0f));
}
