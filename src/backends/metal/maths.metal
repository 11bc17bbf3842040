// Functions of both kernels: exponentials, logarithms near 1, tanh near 0, the activation (scale and softcap), and how a
// row is read and written.
//
// All are in float32. Metal's own exp and log may have errors of 4 units in the last place, which in float32 would be
// most of a gradient's error. The functions here have errors of 1 or 2 units. Except for the first approximation of a
// logarithm, they use only operations that every device rounds in the same way.

// Products and sums are rounded separately unless `fma` is used. By default the compiler may fuse them, in safe mode
// too, and then a row's loss would depend on what else a kernel computes.
#pragma METAL fp contract(off)

// Loops over arrays in registers must be unrolled; otherwise the arrays are placed in memory.
#define XENT_UNROLL _Pragma("clang loop unroll(full)")

namespace xent {

// exp(r) - 1 for |r| <= log(2) / 2: r + r^2 q(r), with a minimax polynomial q, error 3e-9.
inline float expm1_near_zero(float r) {
  float q = 0.00138145988f;
  q = metal::fma(q, r, 0.00836871658f);
  q = metal::fma(q, r, 0.0416683890f);
  q = metal::fma(q, r, 0.166665211f);
  q = metal::fma(q, r, 0.499999940f);
  return metal::fma(r * r, q, r);
}

// exp, for x <= 88: 2^n exp(r) with x = n log 2 + r. Results below 1e-38, denormal numbers, are 0.
inline float exact_exp(float x) {
  float n = metal::rint(x * 1.44269504f);
  float r = metal::fma(n, -1.42860677e-6f, metal::fma(n, -0.693145752f, x));
  float scaled = 1.0f + expm1_near_zero(r);
  if (x < -87.0f) return 0.0f;
  if (x > 88.0f) return INFINITY;
  return scaled * as_type<float>(static_cast<uint>(static_cast<int>(n) + 127) << 23);
}

// log: Metal's own, followed by one Newton step unless the result is small.
inline float exact_log(float x) {
  float y = metal::log(x);
  bool far = metal::abs(y) > 0.5f && metal::abs(y) < 87.0f;
  return far ? y + metal::fma(x, exact_exp(-y), -1.0f) : y;
}

// exp for each element of logits of type T, for x <= 88. 16-bit logits have a relative precision of 2^-8 or 2^-11; the
// fast function has an error of 2^-24 x + 2^-22. Apple specifies it only for finite numbers: the comparison handles
// -inf, and a product with 0 keeps NaN.
template <typename T>
inline float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return exact_exp(x);
  } else {
    return x < -87.0f ? 0.0f : metal::fma(x, 0.0f, metal::fast::exp(x));
  }
}

// tanh and its slope 1 / cosh^2, each with an error of 1 or 2 units in the last place. On [0, 0.625] an odd polynomial,
// minimax in relative error; elsewhere (1 - q) / (1 + q) and 4q / (1 + q)^2 with q = exp(-2|u|), which do not cancel.
template <typename T>
inline float tanh(float u, thread float& slope) {
  float size = metal::abs(u);
  if (size < 0.625f) {
    float square = u * u;
    float series = -0.005704986397176981f;
    series = metal::fma(series, square, 0.02063908614218235f);
    series = metal::fma(series, square, -0.05373971536755562f);
    series = metal::fma(series, square, 0.13331441581249237f);
    series = metal::fma(series, square, -0.3333328068256378f);
    float near = metal::fma(u * square, series, u);
    slope = metal::fma(-near, near, 1.0f);
    return near;
  }
  float q = exponential<T>(-2.0f * size);
  float inverse = 1.0f / (1.0f + q);
  slope = 4.0f * q * inverse * inverse;
  float far = (1.0f - q) * inverse;
  return u < 0.0f ? -far : far;
}

// exp(u) - 1 without cancellation.
inline float expm1(float u) {
  return metal::abs(u) < 0.34f ? expm1_near_zero(u) : exact_exp(u) - 1.0f;
}

// log(1 + r) for r >= 0: r log(w) / (w - 1) corrects for the rounding of w = 1 + r.
inline float log1p(float r) {
  float w = 1.0f + r;
  if (w == 1.0f) return r;
  return w < 2.0f ? exact_log(w) * (r / (w - 1.0f)) : exact_log(w);
}

// share * value; 0 for a share of 0, also if the value is infinite.
inline float times(float share, float value) {
  return share == 0.0f ? 0.0f : share * value;
}

// x = k tanh(s z / k) with a softcap k, s z without, and its slope dx/dz, for logits of type T.
template <typename T, bool CAPPED>
inline float activate(float z, float softcap, float logit_scale, thread float& slope) {
  float x = z * logit_scale;
  slope = logit_scale;
  if constexpr (CAPPED) {
    float bent_slope;
    x = softcap * tanh<T>(x / softcap, bent_slope);
    slope *= bent_slope;
  }
  return x;
}

// A key with the order of x, from raw logits: scale and softcap keep their order or reverse it; NaN is the largest.
inline float order(float z, float logit_scale) {
  if (z != z) return INFINITY;
  return logit_scale < 0.0f ? -z : logit_scale == 0.0f ? 0.0f : z;
}

// How a row of V elements is distributed over the threads of a threadgroup, 16 bytes at a time.
//
// Thread i has the packs (of 16 bytes) i, i + threads, ... The tail of less than a pack has one thread per element.
// Rows may start at any element: V may be odd, and the logits may be a slice. So packs are read and written as packed
// vectors of 4, which need only the alignment of their elements.

// Elements in a pack.
template <typename T>
static constexpr constant uint width = 16 / sizeof(T);

struct Columns {
  uint count;  // V
  uint packs;
  uint edge;   // this thread's element of the tail; V if it has none
  uint first;  // this thread's first pack: its index
  uint threads;
};

template <typename T>
inline void unpack(uint4 bits, thread float (&values)[16 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4) {
    float4 all = as_type<float4>(bits);
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) values[i] = all[i];
  } else {
    uint2 part;
    part.x = bits.x;
    part.y = bits.y;
    metal::vec<T, 4> low = as_type<metal::vec<T, 4>>(part);
    part.x = bits.z;
    part.y = bits.w;
    metal::vec<T, 4> high = as_type<metal::vec<T, 4>>(part);
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) {
      values[i] = static_cast<float>(low[i]);
      values[i + 4] = static_cast<float>(high[i]);
    }
  }
}

template <typename T>
inline uint4 load_pack(const device T* row, uint index) {
  const device T* place = row + static_cast<size_t>(index) * width<T>;
  if constexpr (sizeof(T) == 4) {
    return uint4(*reinterpret_cast<const device packed_uint4*>(place));
  } else {
    uint2 low = as_type<uint2>(ushort4(*reinterpret_cast<const device packed_ushort4*>(place)));
    uint2 high = as_type<uint2>(ushort4(*reinterpret_cast<const device packed_ushort4*>(place + 4)));
    uint4 bits;
    bits.x = low.x;
    bits.y = low.y;
    bits.z = high.x;
    bits.w = high.y;
    return bits;
  }
}

// Write the values of a pack, rounded to T.
template <typename T>
inline void store_pack(device T* row, uint index, thread float (&values)[16 / sizeof(T)]) {
  device T* place = row + static_cast<size_t>(index) * width<T>;
  if constexpr (sizeof(T) == 4) {
    float4 all;
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) all[i] = values[i];
    *reinterpret_cast<device packed_uint4*>(place) = packed_uint4(as_type<uint4>(all));
  } else {
    metal::vec<T, 4> low, high;
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) {
      low[i] = static_cast<T>(values[i]);
      high[i] = static_cast<T>(values[i + 4]);
    }
    *reinterpret_cast<device packed_ushort4*>(place) = packed_ushort4(as_type<ushort4>(low));
    *reinterpret_cast<device packed_ushort4*>(place + 4) = packed_ushort4(as_type<ushort4>(high));
  }
}

// The number of packs that a thread loads at one time, for packs that it does not keep.
constant constexpr uint batch = 4;

// Read packs `index`, `index + threads`, ... up to the end of the row.
template <typename T, uint N>
inline void load_packs(const device T* logits, thread uint4 (&packs)[N], Columns columns, uint index) {
  XENT_UNROLL
  for (uint k = 0; k < N; ++k) {
    if (index + k * columns.threads < columns.packs) packs[k] = load_pack(logits, index + k * columns.threads);
  }
}

}  // namespace xent
