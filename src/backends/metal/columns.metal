// How a row of V elements is shared out among the threads of a threadgroup, 16 bytes at a time.
//
// Rows begin anywhere: V may be odd, and the logits a slice of something. So a row has a head of less than a pack before
// the first 16-byte boundary, packs of 16 bytes, and a tail. Pack i belongs to thread i, i + threads, ...; of head and
// tail each element has a thread of its own.

namespace xent {

// Elements in a pack.
template <typename T>
static constexpr constant uint width = 16 / sizeof(T);

struct Columns {
  uint count;  // V
  uint head;   // elements before the first pack
  uint packs;
  uint edge;   // the one element of head or tail that is this thread's; V where it has none
};

template <typename T>
inline Columns share_out(const device T* row, uint count, uint thread_index) {
  Columns columns;
  columns.count = count;
  uint beyond = static_cast<uint>(reinterpret_cast<ulong>(row) % 16) / static_cast<uint>(sizeof(T));
  columns.head = metal::min((width<T> - beyond) % width<T>, count);
  columns.packs = (count - columns.head) / width<T>;
  uint tail = count - columns.head - columns.packs * width<T>;
  columns.edge = count;
  if (thread_index < columns.head) columns.edge = thread_index;
  if (thread_index >= width<T> && thread_index - width<T> < tail) {
    columns.edge = count - tail + thread_index - width<T>;
  }
  return columns;
}

// The first column of a pack.
template <typename T>
inline uint first_column(Columns columns, uint pack) {
  return columns.head + pack * width<T>;
}

template <typename T>
inline uint4 load_pack(const device T* row, uint column) {
  return *reinterpret_cast<const device uint4*>(row + column);
}

template <typename T>
inline void unpack(uint4 bits, thread float (&values)[16 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4) {
    float4 all = as_type<float4>(bits);
    for (uint i = 0; i < 4; ++i) values[i] = all[i];
  } else {
    uint2 half_of_it;
    half_of_it.x = bits.x;
    half_of_it.y = bits.y;
    metal::vec<T, 4> low = as_type<metal::vec<T, 4>>(half_of_it);
    half_of_it.x = bits.z;
    half_of_it.y = bits.w;
    metal::vec<T, 4> high = as_type<metal::vec<T, 4>>(half_of_it);
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
    for (uint i = 0; i < 4; ++i) all[i] = values[i];
    bits = as_type<uint4>(all);
  } else {
    metal::vec<T, 4> low, high;
    for (uint i = 0; i < 4; ++i) {
      low[i] = static_cast<T>(values[i]);
      high[i] = static_cast<T>(values[i + 4]);
    }
    uint2 half_of_it = as_type<uint2>(low);
    bits.x = half_of_it.x;
    bits.y = half_of_it.y;
    half_of_it = as_type<uint2>(high);
    bits.z = half_of_it.x;
    bits.w = half_of_it.y;
  }
  return bits;
}

// Write a pack's gradients; in one piece where the place is aligned as the logits are.
template <typename T>
inline void store_pack(device T* row, uint column, bool aligned, thread float (&values)[16 / sizeof(T)]) {
  if (aligned) {
    *reinterpret_cast<device uint4*>(row + column) = pack<T>(values);
  } else {
    for (uint i = 0; i < width<T>; ++i) row[column + i] = static_cast<T>(values[i]);
  }
}

}  // namespace xent
