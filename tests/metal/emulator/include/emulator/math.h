// Metal's mathematical functions, erring by as much as its specification lets them.
//
// The fast variants are promised for finite arguments and results alone; elsewhere they return a number that is plainly
// wrong. Of a number and NaN, max and min return either: the specification speaks of fmax and fmin.
#pragma once

#include "types.h"

#undef INFINITY
#undef NAN
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

namespace emulator {

// Return a value up to 4 units in the last place away, always the same for the same value. 0, 1 and infinity stay.
inline float err(float value) {
  if (value == 0 || value == 1 || value == -1 || !(std::fabs(value) < 1e38f)) return value;
  uint bits = std::bit_cast<uint>(value), hash = bits * 2654435761u;
  hash = (hash ^ hash >> 13) * 2246822519u;
  return std::bit_cast<float>(bits + (hash >> 16) % 9 - 4);
}

constexpr float garbage = 0.8125f;

// Return the result of a fast function, or garbage where nothing is promised.
inline float fast(float x, float result) {
  return std::isfinite(x) && std::isfinite(result) ? result : garbage;
}

// Return the number or the NaN, as the number's last bit has it.
inline float either(float x, float y) {
  float number = x != x ? y : x;
  return std::bit_cast<uint>(number) & 1 ? number : x + y;
}

}  // namespace emulator

namespace metal {

namespace precise {
inline float exp(float x) { return emulator::err(std::exp(x)); }
inline float log(float x) { return emulator::err(std::log(x)); }
inline float tanh(float x) { return emulator::err(std::tanh(x)); }
}  // namespace precise

namespace fast {
inline float exp(float x) { return emulator::fast(x, emulator::err(std::exp2(x * 1.44269504f))); }
inline float log(float x) { return emulator::fast(x, emulator::err(std::log2(x)) * 0.693147181f); }
// Overflows where both exponentials do, and cancels near 0.
inline float tanh(float x) { return (exp(x) - exp(-x)) / (exp(x) + exp(-x)); }
}  // namespace fast

using precise::exp;
using precise::log;
using precise::tanh;

inline float abs(float x) { return std::fabs(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline float rint(float x) { return std::rint(x); }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline float fmax(float x, float y) { return std::fmax(x, y); }
inline float fmin(float x, float y) { return std::fmin(x, y); }
inline float max(float x, float y) { return x != x || y != y ? emulator::either(x, y) : x < y ? y : x; }
inline float min(float x, float y) { return x != x || y != y ? emulator::either(x, y) : y < x ? y : x; }
inline int max(int x, int y) { return x < y ? y : x; }
inline int min(int x, int y) { return y < x ? y : x; }
inline uint max(uint x, uint y) { return x < y ? y : x; }
inline uint min(uint x, uint y) { return y < x ? y : x; }
inline ulong max(ulong x, ulong y) { return x < y ? y : x; }
inline ulong min(ulong x, ulong y) { return y < x ? y : x; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::fabs(x) == INFINITY; }

}  // namespace metal
