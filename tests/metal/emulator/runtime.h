// What a kernel sees of the emulator, and what the emulator's shared library offers to kernels.
//
// A threadgroup's threads are fibers on one CPU thread. A fiber runs until it reaches a barrier or a SIMD-group
// collective, or ends; the scheduler then lets another run, in an order drawn from the seed.

#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Triple {
  uint32_t x, y, z;
};

// One thread of a launch, with the values of Metal's attributes for it.
struct Thread {
  Triple thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Triple threads_per_grid, threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t threads_per_simdgroup, simdgroups_per_threadgroup;
};

constexpr uint32_t simd_width = 32;

// What is known about one element of threadgroup memory: who touched it last, and between which barriers.
struct Touch {
  uint32_t thread, group_epoch, simd_epoch;
};

struct Cell {
  bool written;
  Touch write, read;
  bool several_groups, several_lanes;  // read since the last barrier, of the threadgroup and of the SIMD-group
};

// The values that the lanes of a SIMD-group have put down at one collective.
struct Exchange {
  alignas(16) unsigned char value[simd_width][16];
  uint32_t active;  // a bit for each lane that takes part
};

extern "C" {
// The thread that runs now.
const Thread& emulator_thread();
// Wait for all threads of the threadgroup, or of the SIMD-group, at this place of the source.
void emulator_threadgroup_barrier(int line, bool orders_threadgroup_memory);
void emulator_simdgroup_barrier(int line, bool orders_threadgroup_memory);
// Put down a value and wait for the lanes of the SIMD-group that are at the same collective.
const Exchange& emulator_exchange(const void* value, size_t size, const char* name);
// The memory of a `threadgroup` variable, and the records of its elements.
void* emulator_claim(int declaration, size_t size, size_t count, Cell** cells);
void emulator_touch(Cell* cell, bool writes, int declaration, size_t index);
// End the launch with an error.
[[noreturn]] void emulator_fail(const char* kind, const char* format, ...);
}

}  // namespace emulator
