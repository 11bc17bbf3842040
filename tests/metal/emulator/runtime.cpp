// The emulator's shared library: what kernels call, and the launch itself.

#include "schedule.h"

#include <signal.h>
#include <sys/mman.h>

#include <iterator>

namespace emulator {
namespace {

void on_fault(int number, siginfo_t* info, void*) {
  if (launch == nullptr || launch->running == nullptr) {
    signal(number, SIG_DFL);
    return;
  }
  if (number == SIGILL || number == SIGTRAP) {
    fail_launch("misaligned access", "a pointer has less alignment than what it points to");
    leave();
  }
  fail_launch("out of bounds", "touched address %p", info->si_addr);
  launch->error[launch->error_size - 1] = 1;  // the address is to be explained
  memcpy(launch->error + launch->error_size - 1 - sizeof(void*), &info->si_addr, sizeof(void*));
  leave();
}

bool ordered(const Touch& earlier) {
  const Thread& thread = launch->running->thread;
  if (earlier.thread == thread.thread_index_in_threadgroup || earlier.group_epoch != launch->epoch) return true;
  uint32_t group = thread.simdgroup_index_in_threadgroup;
  return earlier.thread / simd_width == group && earlier.simd_epoch != launch->groups[group].epoch;
}

}  // namespace

extern "C" {

const Thread& emulator_thread() { return launch->running->thread; }

void emulator_threadgroup_barrier(int line, bool orders_threadgroup_memory) {
  uint32_t before = launch->epoch;
  wait(State::at_barrier, nullptr, line);
  // The first thread to go on opens the next epoch for all.
  if (orders_threadgroup_memory && launch->epoch == before) ++launch->epoch;
}

void emulator_simdgroup_barrier(int line, bool orders_threadgroup_memory) {
  SimdGroup& group = launch->groups[launch->running->thread.simdgroup_index_in_threadgroup];
  uint32_t before = group.epoch;
  wait(State::at_simd_barrier, nullptr, line);
  if (orders_threadgroup_memory && group.epoch == before) ++group.epoch;
}

const Exchange& emulator_exchange(const void* value, size_t size, const char* name) {
  const Thread& thread = launch->running->thread;
  SimdGroup& group = launch->groups[thread.simdgroup_index_in_threadgroup];
  Exchange& exchange = group.exchange[group.turn % 2];
  memcpy(exchange.value[thread.thread_index_in_simdgroup], value, size);
  exchange.active |= 1u << thread.thread_index_in_simdgroup;
  wait(State::at_collective, name, 0);
  return exchange;
}

void* emulator_claim(int declaration, size_t size, size_t count, Cell** cells) {
  for (Variable& variable : launch->variables) {
    if (variable.declaration == declaration) {
      *cells = variable.cells.get();
      return launch->memory + variable.offset;
    }
  }
  size_t offset = (launch->used + 15) / 16 * 16;
  if (offset + size > threadgroup_memory_size) {
    emulator_fail("threadgroup memory", "%zu bytes are used and there are %zu", offset + size, threadgroup_memory_size);
  }
  launch->used = offset + size;
  launch->variables.push_back({declaration, offset, size, std::make_unique<Cell[]>(count)});
  *cells = launch->variables.back().cells.get();
  for (size_t index = 0; index < count; ++index) (*cells)[index].read.thread = no_thread;
  return launch->memory + offset;
}

void emulator_touch(Cell* cell, bool writes, int declaration, size_t index) {
  const Thread& thread = launch->running->thread;
  uint32_t group = thread.simdgroup_index_in_threadgroup;
  Touch now{thread.thread_index_in_threadgroup, launch->epoch, launch->groups[group].epoch};
  if (!writes && !cell->written) {
    emulator_fail("uninitialised threadgroup memory", "reads element %zu of variable %d", index, declaration);
  }
  if (cell->written && !ordered(cell->write)) {
    emulator_fail("missing barrier", "%s element %zu of variable %d, which thread %u wrote since the last barrier",
                  writes ? "writes" : "reads", index, declaration, cell->write.thread);
  }
  bool read = cell->read.thread != no_thread && cell->read.group_epoch == now.group_epoch;
  bool same_group = cell->read.thread / simd_width == group;
  bool same_epoch = same_group && cell->read.simd_epoch == now.simd_epoch;
  if (writes) {
    bool stranger = cell->several_lanes || cell->read.thread != now.thread;
    if (read && (cell->several_groups || !same_group || (same_epoch && stranger))) {
      emulator_fail("missing barrier", "writes element %zu of variable %d, which thread %u read since the last barrier",
                    index, declaration, cell->read.thread);
    }
    cell->written = true;
    cell->write = now;
    cell->read.thread = no_thread;
    return;
  }
  cell->several_groups = read && (cell->several_groups || !same_group);
  cell->several_lanes = read && same_epoch && (cell->several_lanes || cell->read.thread != now.thread);
  cell->read = now;
}

void emulator_fail(const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(kind, format, arguments);
  va_end(arguments);
  leave();
}

// Run a kernel over a grid of threads, or only the threadgroup at `only` if that is given; return 0, or 1 with a message
// in `error`, or 2 with the address of a stray access.
int emulator_launch(Entry entry, void* const* buffers, const uint32_t* grid, const uint32_t* threadgroup,
                    const uint32_t* only, uint64_t seed, char* error, size_t error_size, uint64_t* address) {
  if (stacks == nullptr) {
    void* place = mmap(nullptr, most_threads * stack_size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return snprintf(error, error_size, "no memory for stacks"), 1;
    stacks = static_cast<char*>(place);
  }
  static std::vector<char> signal_stack(64 << 10);
  stack_t alternate{}, old_alternate{};
  alternate.ss_sp = signal_stack.data();
  alternate.ss_size = signal_stack.size();
  sigaltstack(&alternate, &old_alternate);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  constexpr int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction before[std::size(faults)];
  for (size_t index = 0; index < std::size(faults); ++index) sigaction(faults[index], &action, &before[index]);

  static auto held = std::make_unique<Launch>();
  launch = held.get();
  launch->entry = entry;
  launch->buffers = buffers;
  launch->failed = false;
  launch->error = error;
  launch->error_size = error_size;
  memset(error, 0, error_size);
  Triple whole{grid[0], grid[1], grid[2]};
  Triple size{std::min(threadgroup[0], whole.x), std::min(threadgroup[1], whole.y), std::min(threadgroup[2], whole.z)};
  if (uint64_t(size.x) * size.y * size.z > most_threads) {
    fail_launch("threadgroup size", "%u x %u x %u threads, and at most %zu fit", size.x, size.y, size.z, most_threads);
  } else {
    Random random(seed);
    std::vector<Triple> places;
    if (only != nullptr) places.push_back({only[0], only[1], only[2]});
    for (uint32_t z = 0; only == nullptr && z * size.z < whole.z; ++z)
      for (uint32_t y = 0; y * size.y < whole.y; ++y)
        for (uint32_t x = 0; x * size.x < whole.x; ++x) places.push_back({x, y, z});
    random.shuffle(places);
    for (Triple place : places) {
      run_threadgroup(place, whole, size, random.next());
      if (launch->failed) break;
    }
  }
  for (size_t index = 0; index < std::size(faults); ++index) sigaction(faults[index], &before[index], nullptr);
  if (!(old_alternate.ss_flags & SS_DISABLE)) sigaltstack(&old_alternate, nullptr);
  bool strayed = error[error_size - 1] != 0;
  if (strayed) {
    void* where;
    memcpy(&where, error + error_size - 1 - sizeof(void*), sizeof(void*));
    *address = reinterpret_cast<uint64_t>(where);
    error[error_size - 1] = 0;
  }
  bool failed = launch->failed;
  launch = nullptr;
  return strayed ? 2 : failed ? 1 : 0;
}
}

}  // namespace emulator
