// Arithmetic that the kernels share: exponentials, logarithms near 1, tanh near 0, and the logits' activation.
//
// All of it is in float32. Functions of a row are as exact as float32 allows; what is done for each element may be as
// coarse as the logits themselves.

// Loops over what lies in registers have to be unrolled, or it lies in memory.
#define XENT_UNROLL _Pragma("clang loop unroll(full)")

namespace xent {

// exp for each element of logits of type T. Those of 16 bits are known to 2^-8 or 2^-11 of their size; the fast
// function errs by 2^-24 of x, and 2^-22 beside.
template <typename T>
inline float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return metal::exp(x);
  } else {
    return metal::fast::exp(x);
  }
}

// tanh and its slope 1 / cosh^2, each to a rounding or two. Near 0 an odd polynomial, the best of its degree in relative
// error on [0, 0.625]; elsewhere, with q = exp(-2|u|), (1 - q) / (1 + q) and 4q / (1 + q)^2, in which nothing cancels.
template <typename T>
inline float tanh(float u, thread float& slope) {
  float size = metal::abs(u);
  if (size < 0.625f) {
    float square = u * u;
    float series = -0.005704986397176981f;
    series = series * square + 0.02063908614218235f;
    series = series * square - 0.05373971536755562f;
    series = series * square + 0.13331441581249237f;
    series = series * square - 0.3333328068256378f;
    float near = u + u * square * series;
    slope = 1.0f - near * near;
    return near;
  }
  float q = exponential<T>(-2.0f * size);
  float inverse = 1.0f / (1.0f + q);
  slope = 4.0f * q * inverse * inverse;
  float far = (1.0f - q) * inverse;
  return u < 0.0f ? -far : far;
}

// exp(u) - 1 without cancellation for u <= 0: (e - 1) u / log(e) forgives what e = exp(u) was rounded by.
inline float expm1(float u) {
  float e = metal::exp(u);
  if (e == 1.0f) return u;
  return e > 0.5f ? (e - 1.0f) * (u / metal::log(e)) : e - 1.0f;
}

// log(1 + r) for r >= 0: r log(w) / (w - 1) forgives what w = 1 + r was rounded by.
inline float log1p(float r) {
  float w = 1.0f + r;
  if (w == 1.0f) return r;
  return w < 2.0f ? metal::log(w) * (r / (w - 1.0f)) : metal::log(w);
}

// share * value; what has no share is 0, even where the value is infinite.
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

// What sorts logits as x does: scale and softcap keep their order or reverse it; NaN is the largest.
inline float order(float z, float logit_scale) {
  if (z != z) return INFINITY;
  return logit_scale < 0.0f ? -z : logit_scale == 0.0f ? 0.0f : z;
}

}  // namespace xent
