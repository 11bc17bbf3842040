// How a row of V elements is shared out among the threads of a threadgroup, 16 bytes at a time.
//
// Pack i, of 16 bytes, belongs to thread i, i + threads, ...; of the tail of less than a pack each element has a thread
// of its own. Who adds up what is so the same wherever a row lies, and a row's loss has the same bits in every batch.
// Rows that begin at a multiple of 16 bytes, as all do in logits of a V that is a multiple of 8, are read and written
// in whole packs; others, of an odd V or in a slice of something, element by element.

namespace xent {

// Elements in a pack.
template <typename T>
static constexpr constant uint width = 16 / sizeof(T);

struct Columns {
  uint count;  // V
  uint packs;
  uint edge;   // the one element of the tail that is this thread's; V where it has none
};

template <typename T>
inline Columns share_out(uint count, uint thread_index) {
  Columns columns;
  columns.count = count;
  columns.packs = count / width<T>;
  columns.edge = metal::min(columns.packs * width<T> + thread_index, count);
  return columns;
}

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
inline uint4 pack(thread float (&values)[16 / sizeof(T)]) {
  uint4 bits;
  if constexpr (sizeof(T) == 4) {
    float4 all;
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) all[i] = values[i];
    bits = as_type<uint4>(all);
  } else {
    metal::vec<T, 4> low, high;
    XENT_UNROLL
    for (uint i = 0; i < 4; ++i) {
      low[i] = static_cast<T>(values[i]);
      high[i] = static_cast<T>(values[i + 4]);
    }
    uint2 part = as_type<uint2>(low);
    bits.x = part.x;
    bits.y = part.y;
    part = as_type<uint2>(high);
    bits.z = part.x;
    bits.w = part.y;
  }
  return bits;
}

template <typename T>
inline bool is_aligned(const device T* place) {
  return reinterpret_cast<ulong>(place) % 16 == 0;
}

template <typename T>
inline uint4 load_pack(const device T* row, uint index, bool aligned) {
  const device T* place = row + static_cast<size_t>(index) * width<T>;
  if (aligned) return *reinterpret_cast<const device uint4*>(place);
  float values[16 / sizeof(T)];
  XENT_UNROLL
  for (uint i = 0; i < width<T>; ++i) values[i] = static_cast<float>(place[i]);
  return pack<T>(values);
}

template <typename T>
inline void store_pack(device T* row, uint index, bool aligned, thread float (&values)[16 / sizeof(T)]) {
  device T* place = row + static_cast<size_t>(index) * width<T>;
  if (aligned) {
    *reinterpret_cast<device uint4*>(place) = pack<T>(values);
  } else {
    XENT_UNROLL
    for (uint i = 0; i < width<T>; ++i) place[i] = static_cast<T>(values[i]);
  }
}

}  // namespace xent
