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

namespace metal {

template <typename T, int N>
struct alignas(sizeof(T) * N) vec {
  T values[N];

  vec() = default;
  explicit vec(T all) {
    for (T& value : values) value = all;
  }
  template <typename... Rest>
    requires(sizeof...(Rest) == N - 2)
  vec(T first, T second, Rest... rest) : values{first, second, static_cast<T>(rest)...} {}
  template <typename Other>
  explicit vec(const vec<Other, N>& other) {
    for (int i = 0; i < N; ++i) values[i] = static_cast<T>(other.values[i]);
  }
  T& operator[](int i) { return values[i]; }
  const T& operator[](int i) const { return values[i]; }
};

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

#define EMULATOR_COMPONENTWISE(op)                                       \
  template <typename T, int N>                                           \
  vec<T, N> operator op(vec<T, N> left, const vec<T, N>& right) {        \
    for (int i = 0; i < N; ++i) left[i] = left[i] op right[i];           \
    return left;                                                         \
  }                                                                      \
  template <typename T, int N>                                           \
  vec<T, N> operator op(vec<T, N> left, std::type_identity_t<T> right) { \
    return left op vec<T, N>(right);                                     \
  }
EMULATOR_COMPONENTWISE(+)
EMULATOR_COMPONENTWISE(-)
EMULATOR_COMPONENTWISE(*)
EMULATOR_COMPONENTWISE(/)
#undef EMULATOR_COMPONENTWISE

template <typename To, typename From>
To as_type(const From& from) {
  return std::bit_cast<To>(from);
}

template <typename T, typename U>
inline constexpr bool is_same_v = std::is_same_v<T, U>;
template <bool Holds, typename T = void>
using enable_if_t = std::enable_if_t<Holds, T>;
template <bool Holds, typename T, typename U>
using conditional_t = std::conditional_t<Holds, T, U>;

}  // namespace metal

using float2 = metal::vec<float, 2>;
using float3 = metal::vec<float, 3>;
using float4 = metal::vec<float, 4>;
using half2 = metal::vec<half, 2>;
using half4 = metal::vec<half, 4>;
using bfloat2 = metal::vec<bfloat, 2>;
using bfloat4 = metal::vec<bfloat, 4>;
using uint2 = metal::vec<uint, 2>;
using uint3 = metal::vec<uint, 3>;
using uint4 = metal::vec<uint, 4>;
using ushort4 = metal::vec<ushort, 4>;
using int2 = metal::vec<int, 2>;
using int4 = metal::vec<int, 4>;
using packed_ushort4 = metal::packed_vec<ushort, 4>;
using packed_uint4 = metal::packed_vec<uint, 4>;
using metal::as_type;
