// How a row of V elements is distributed over the threads of a threadgroup, 16 bytes at a time.
//
// Thread i has the packs (of 16 bytes) i, i + threads, ... The tail of less than a pack has one thread per element.
// Rows may start at any element: V may be odd, and the logits may be a slice. So packs are read and written as packed
// vectors of 4, which need only the alignment of their elements.

namespace xent {

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
inline Columns share_out(uint count, uint thread_index, uint threads) {
  Columns columns;
  columns.count = count;
  columns.packs = count / width<T>;
  columns.edge = metal::min(columns.packs * width<T> + thread_index, count);
  columns.first = thread_index;
  columns.threads = threads;
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
