// Metal's mathematical functions. The fast ones err as their definitions make them.
#pragma once

#include "types.h"

#undef INFINITY
#undef NAN
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

namespace metal {

namespace precise {
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float log(float x) { return std::log(x); }
inline float log2(float x) { return std::log2(x); }
inline float tanh(float x) { return std::tanh(x); }
}  // namespace precise

namespace fast {
inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float exp(float x) { return exp2(x * 1.44269504f); }
inline float log(float x) { return log2(x) * 0.693147181f; }
// Overflows where both exponentials do, and cancels near 0.
inline float tanh(float x) { return (exp(x) - exp(-x)) / (exp(x) + exp(-x)); }
}  // namespace fast

using precise::exp;
using precise::exp2;
using precise::log;
using precise::log2;
using precise::tanh;

inline float abs(float x) { return std::fabs(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline float max(float x, float y) { return std::fmax(x, y); }
inline float min(float x, float y) { return std::fmin(x, y); }
inline int max(int x, int y) { return x < y ? y : x; }
inline int min(int x, int y) { return y < x ? y : x; }
inline uint max(uint x, uint y) { return x < y ? y : x; }
inline uint min(uint x, uint y) { return y < x ? y : x; }
inline ulong max(ulong x, ulong y) { return x < y ? y : x; }
inline ulong min(ulong x, ulong y) { return y < x ? y : x; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::fabs(x) == INFINITY; }

}  // namespace metal
