// What threads do together: barriers, the collectives of a SIMD-group, threadgroup memory.
#pragma once

#include <limits>

#include "math.h"

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags one, mem_flags other) { return mem_flags(uint(one) | uint(other)); }

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::emulator_threadgroup_barrier(line, uint(flags) & uint(mem_flags::mem_threadgroup));
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::emulator_simdgroup_barrier(line, uint(flags) & uint(mem_flags::mem_threadgroup));
}

}  // namespace metal

namespace emulator {

// Read the value of a lane that takes part; one that does not has none.
template <typename T>
T value_of_lane(const Exchange& exchange, uint lane, const char* name) {
  if (lane >= simd_width || !(exchange.active >> lane & 1)) {
    emulator_fail("inactive lane", "%s reads lane %u, which takes no part", name, lane);
  }
  T value;
  __builtin_memcpy(&value, exchange.value[lane], sizeof(T));
  return value;
}

// Combine the values of the active lanes pairwise, as hardware does, in an order that nothing changes.
template <typename T, typename Combine>
T reduce(T mine, const char* name, Combine combine) {
  const Exchange& exchange = emulator_exchange(&mine, sizeof(T), name);
  T values[simd_width];
  uint active = exchange.active;
  for (uint lane = 0; lane < simd_width; ++lane) {
    if (active >> lane & 1) values[lane] = value_of_lane<T>(exchange, lane, name);
  }
  for (uint step = 1; step < simd_width; step *= 2) {
    for (uint lane = 0; lane < simd_width; lane += 2 * step) {
      bool here = active >> lane & 1, there = active >> (lane + step) & 1;
      if (here && there) values[lane] = combine(values[lane], values[lane + step]);
      if (!here && there) values[lane] = values[lane + step];
      if (there) active |= 1u << lane;
    }
  }
  return values[0];
}

// Refuse NaN where Metal's specification says nothing about it, and where GPUs drop it or not.
template <typename T>
T ordered(T x, const char* name) {
  if (x != x) emulator_fail("undefined result", "%s is handed NaN", name);
  return x;
}

}  // namespace emulator

namespace metal {

#define EMULATOR_REDUCTIONS(T)                                                                                    \
  inline T simd_sum(T x) { return emulator::reduce(x, "simd_sum", [](T a, T b) { return T(a + b); }); }           \
  inline T simd_max(T x) {                                                                                        \
    return emulator::reduce(emulator::ordered(x, "simd_max"), "simd_max",                                         \
                            [](T a, T b) { return metal::max(a, b); });                                           \
  }                                                                                                               \
  inline T simd_min(T x) {                                                                                        \
    return emulator::reduce(emulator::ordered(x, "simd_min"), "simd_min",                                         \
                            [](T a, T b) { return metal::min(a, b); });                                           \
  }                                                                                                               \
  inline T simd_shuffle(T x, ushort lane) {                                                                       \
    return emulator::value_of_lane<T>(emulator::emulator_exchange(&x, sizeof x, "simd_shuffle"), lane,            \
                                      "simd_shuffle");                                                            \
  }                                                                                                               \
  inline T simd_shuffle_xor(T x, ushort mask) {                                                                   \
    uint lane = emulator::emulator_thread().thread_index_in_simdgroup ^ mask;                                     \
    return emulator::value_of_lane<T>(emulator::emulator_exchange(&x, sizeof x, "simd_shuffle_xor"), lane,        \
                                      "simd_shuffle_xor");                                                        \
  }                                                                                                               \
  inline T simd_broadcast(T x, ushort lane) {                                                                     \
    return emulator::value_of_lane<T>(emulator::emulator_exchange(&x, sizeof x, "simd_broadcast"), lane,          \
                                      "simd_broadcast");                                                          \
  }
EMULATOR_REDUCTIONS(float)
EMULATOR_REDUCTIONS(int)
EMULATOR_REDUCTIONS(uint)
#undef EMULATOR_REDUCTIONS

}  // namespace metal

namespace emulator {

// A reference to an element of threadgroup memory that keeps record of who touches it.
template <typename T>
struct SharedElement {
  T* place;
  Cell* cell;
  int declaration;
  size_t index;

  operator T() const {
    emulator_touch(cell, false, declaration, index);
    return *place;
  }
  SharedElement& operator=(T value) {
    emulator_touch(cell, true, declaration, index);
    *place = value;
    return *this;
  }
  SharedElement& operator=(const SharedElement& other) { return *this = static_cast<T>(other); }
  SharedElement& operator+=(T value) { return *this = static_cast<T>(*this) + value; }
};

// `threadgroup T*`, and a `threadgroup T name[N]` declaration, with bounds.
template <typename T>
struct Shared {
  T* values;
  Cell* cells;
  int declaration;
  ptrdiff_t first, count;

  SharedElement<T> operator[](ptrdiff_t i) const {
    ptrdiff_t at = first + i;
    if (at < 0 || at >= count) {
      emulator_fail("out of bounds", "element %td of variable %d, which has %td", at, declaration, count);
    }
    return {values + at, cells + at, declaration, static_cast<size_t>(at)};
  }
  SharedElement<T> operator*() const { return (*this)[0]; }
  Shared operator+(ptrdiff_t by) const { return {values, cells, declaration, first + by, count}; }
};

template <typename T, ptrdiff_t N>
Shared<T> claim(int declaration) {
  Cell* cells = nullptr;
  void* memory = emulator_claim(declaration, sizeof(T) * N, N, &cells);
  return {static_cast<T*>(memory), cells, declaration, 0, N};
}

}  // namespace emulator
