// The state of a launch: the threads of the threadgroup that runs, and its memory.

#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "fibers.h"
#include "runtime.h"

namespace emulator {

constexpr size_t threadgroup_memory_size = 32 << 10;
constexpr size_t most_threads = 1024;
constexpr uint32_t no_thread = UINT32_MAX;

enum class State { ready, at_collective, at_simd_barrier, at_barrier, done };

using Entry = void (*)(void* const* buffers, const Thread& thread);

struct Fiber {
  Context context;
  Thread thread;
  State state;
  const char* collective;
  int line;
};

struct SimdGroup {
  std::vector<Fiber*> lanes;
  Exchange exchange[2];  // a lane may reach the next collective before another has read this one
  uint32_t turn;
  uint32_t epoch;
};

struct Variable {
  int declaration;
  size_t offset, size;
  std::unique_ptr<Cell[]> cells;
};

struct Random {
  uint64_t state;

  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u) {}

  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }

  template <typename Items>
  void shuffle(Items& items) {
    for (size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[next() % left]);
  }
};

struct Launch {
  Entry entry = nullptr;
  void* const* buffers = nullptr;
  Context scheduler{};
  Fiber* running = nullptr;
  bool failed = false;
  char* error = nullptr;
  size_t error_size = 0;
  uint32_t epoch = 0;
  std::vector<Fiber> fibers;
  std::vector<SimdGroup> groups;
  std::vector<Variable> variables;
  size_t used = 0;
  alignas(64) unsigned char memory[threadgroup_memory_size];
};

inline Launch* launch = nullptr;
inline char* stacks = nullptr;

inline void report(const char* kind, const char* format, va_list arguments) {
  launch->failed = true;
  int written = snprintf(launch->error, launch->error_size, "%s: ", kind);
  if (launch->running != nullptr) {
    const Thread& thread = launch->running->thread;
    written += snprintf(launch->error + written, launch->error_size - written, "thread %u of threadgroup (%u, %u, %u): ",
                        thread.thread_index_in_threadgroup, thread.threadgroup_position_in_grid.x,
                        thread.threadgroup_position_in_grid.y, thread.threadgroup_position_in_grid.z);
  }
  vsnprintf(launch->error + written, launch->error_size - written, format, arguments);
}

inline void fail_launch(const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(kind, format, arguments);
  va_end(arguments);
}

[[noreturn]] inline void leave() {
  for (;;) switch_to(launch->running->context, launch->scheduler);
}

}  // namespace emulator
