// Metal's scalar and vector types, with the sizes, alignments and roundings that the language gives them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../runtime.h"

// Execution has one memory. The front-end check sees to address spaces.
#define device
#define constant
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
#define __METAL_VERSION__ 320

using uchar = unsigned char;
using ushort = uint16_t;
using uint = uint32_t;
using ulong = uint64_t;
using half = _Float16;

// bfloat: the upper half of a float, rounded to nearest, ties to even.
struct bfloat {
  ushort bits;

  bfloat() = default;
  explicit bfloat(float value) {
    uint wide = std::bit_cast<uint>(value);
    bool is_nan = (wide & 0x7FFFFFFFu) > 0x7F800000u;
    bits = static_cast<ushort>(is_nan ? 0x7FC0u : (wide + 0x7FFFu + (wide >> 16 & 1u)) >> 16);
  }
  template <typename Number>
    requires std::is_arithmetic_v<Number>
  explicit bfloat(Number value) : bfloat(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(uint(bits) << 16); }
};

namespace emulator {

// A buffer's address, as a pointer to whatever the kernel's parameter says.
struct Pointer {
  void* address;

  template <typename T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

}  // namespace emulator

namespace metal {

template <typename T, int N>
struct vec;

// Vectors whose components have names. A third component takes the room of a fourth.
template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;

  vec() = default;
  explicit vec(T all) : x(all), y(all) {}
  vec(T x_, T y_) : x(x_), y(y_) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;

  vec() = default;
  vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  vec(const emulator::Triple& from) : x(from.x), y(from.y), z(from.z) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;

  vec() = default;
  explicit vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  vec(vec<T, 2> low, vec<T, 2> high) : x(low.x), y(low.y), z(high.x), w(high.y) {}
  template <typename Other>
  explicit vec(const vec<Other, 4>& from)
      : x(static_cast<T>(from.x)), y(static_cast<T>(from.y)), z(static_cast<T>(from.z)), w(static_cast<T>(from.w)) {}
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};

// Vectors that need no more alignment than their elements.
template <typename T, int N>
struct packed_vec {
  T values[N];

  explicit packed_vec(const vec<T, N>& from) {
    for (int i = 0; i < N; ++i) values[i] = from[i];
  }
  operator vec<T, N>() const {
    vec<T, N> made;
    for (int i = 0; i < N; ++i) made[i] = values[i];
    return made;
  }
};

template <typename To, typename From>
To as_type(const From& from) {
  return std::bit_cast<To>(from);
}

}  // namespace metal

using float2 = metal::vec<float, 2>;
using float4 = metal::vec<float, 4>;
using half4 = metal::vec<half, 4>;
using bfloat4 = metal::vec<bfloat, 4>;
using uint2 = metal::vec<uint, 2>;
using uint3 = metal::vec<uint, 3>;
using uint4 = metal::vec<uint, 4>;
using ushort4 = metal::vec<ushort, 4>;
using packed_ushort4 = metal::packed_vec<ushort, 4>;
using packed_uint4 = metal::packed_vec<uint, 4>;
using metal::as_type;
