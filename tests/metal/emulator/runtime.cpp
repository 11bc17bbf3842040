// The emulator's shared library: fibers, the scheduler, threadgroup memory, and the launch itself.

#if !defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT  // slower, and everywhere
#endif
#if defined(EMULATOR_UCONTEXT) && defined(__APPLE__)
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif

#include "runtime.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {
namespace {

constexpr size_t stack_size = 128 << 10;
constexpr size_t threadgroup_memory_size = 32 << 10;
constexpr size_t most_threads = 1024;
constexpr uint32_t no_thread = UINT32_MAX;

enum class State { ready, at_collective, at_simd_barrier, at_barrier, done };

using Entry = void (*)(void* const* buffers, const Thread& thread);

#ifdef EMULATOR_UCONTEXT

struct Context {
  ucontext_t place;
};

void switch_to(Context& from, Context& to) { swapcontext(&from.place, &to.place); }

void prepare(Context& context, char* stack, void (*start)()) {
  getcontext(&context.place);
  context.place.uc_stack.ss_sp = stack;
  context.place.uc_stack.ss_size = stack_size;
  context.place.uc_link = nullptr;
  makecontext(&context.place, start, 0);
}

#else

struct Context {
  void* stack_pointer;
};

// Save what a call must preserve, change the stack, and return on the other one.
extern "C" void emulator_switch(void** from, void* to);
__asm__(
    ".text\n"
    ".globl emulator_switch\n"
    "emulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

void switch_to(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

void prepare(Context& context, char* stack, void (*start)()) {
  auto* top = reinterpret_cast<void**>(stack + stack_size);
  *--top = nullptr;  // where `start` would return to, which also aligns its frame
  *--top = reinterpret_cast<void*>(start);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

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

Launch* launch = nullptr;
char* stacks = nullptr;

void report(const char* kind, const char* format, va_list arguments) {
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

void fail_launch(const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(kind, format, arguments);
  va_end(arguments);
}

[[noreturn]] void leave() {
  for (;;) switch_to(launch->running->context, launch->scheduler);
}

void start_fiber() {
  launch->entry(launch->buffers, launch->running->thread);
  launch->running->state = State::done;
  leave();
}

void wait(State state, const char* collective, int line) {
  Fiber& fiber = *launch->running;
  fiber.state = state;
  fiber.collective = collective;
  fiber.line = line;
  switch_to(fiber.context, launch->scheduler);
}

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

void run_fiber(Fiber& fiber) {
  launch->running = &fiber;
  switch_to(launch->scheduler, fiber.context);
  launch->running = nullptr;
}

// Run a SIMD-group until all its threads have ended or wait for the whole threadgroup.
void run_simdgroup(SimdGroup& group, Random& random) {
  std::vector<Fiber*> order = group.lanes;
  while (!launch->failed) {
    random.shuffle(order);
    for (Fiber* fiber : order) {
      if (fiber->state == State::ready) run_fiber(*fiber);
      if (launch->failed) return;
    }
    Fiber* waiting = nullptr;
    bool all = true;
    for (Fiber* fiber : group.lanes) {
      if (fiber->state == State::at_collective || fiber->state == State::at_simd_barrier) waiting = fiber;
    }
    if (waiting == nullptr) return;
    for (Fiber* fiber : group.lanes) {
      bool together = fiber->state == waiting->state && fiber->line == waiting->line &&
                      (waiting->collective == nullptr || strcmp(fiber->collective, waiting->collective) == 0);
      if (fiber->state != State::done || waiting->state == State::at_simd_barrier) all = all && together;
    }
    if (!all) {
      launch->running = waiting;
      fail_launch("divergent collective", "waits at %s while other lanes of its SIMD-group are elsewhere",
                  waiting->collective ? waiting->collective : "simdgroup_barrier");
      launch->running = nullptr;
      return;
    }
    for (Fiber* fiber : group.lanes) {
      if (fiber->state != State::done) fiber->state = State::ready;
    }
    ++group.turn;
    group.exchange[group.turn % 2].active = 0;
  }
}

// Let the threads that wait at a threadgroup barrier go on if all are there; say whether any goes on.
bool pass_barrier() {
  Fiber* waiting = nullptr;
  for (Fiber& fiber : launch->fibers) {
    if (fiber.state == State::at_barrier) waiting = &fiber;
  }
  if (waiting == nullptr) return false;
  for (Fiber& fiber : launch->fibers) {
    if (fiber.state == State::at_barrier && fiber.line == waiting->line) continue;
    launch->running = waiting;
    fail_launch("divergent barrier", "waits at the barrier of line %d, which thread %u %s", waiting->line,
                fiber.thread.thread_index_in_threadgroup,
                fiber.state == State::done ? "has ended without" : "passes by another");
    launch->running = nullptr;
    return false;
  }
  for (Fiber& fiber : launch->fibers) fiber.state = State::ready;
  return true;
}

void run_threadgroup(Triple position, Triple grid, Triple size, uint64_t seed) {
  Random random(seed);
  launch->epoch = 0;
  launch->used = 0;
  launch->variables.clear();
  memset(launch->memory, 0xFF, sizeof launch->memory);
  Triple here{std::min(size.x, grid.x - position.x * size.x), std::min(size.y, grid.y - position.y * size.y),
              std::min(size.z, grid.z - position.z * size.z)};
  uint32_t count = here.x * here.y * here.z;
  launch->fibers.resize(count);
  launch->groups.resize((count + simd_width - 1) / simd_width);
  for (SimdGroup& group : launch->groups) {
    group.lanes.clear();
    group.turn = group.epoch = 0;
    group.exchange[0].active = group.exchange[1].active = 0;
  }
  for (uint32_t index = 0; index < count; ++index) {
    Fiber& fiber = launch->fibers[index];
    Triple at{index % here.x, index / here.x % here.y, index / (here.x * here.y)};
    Thread& thread = fiber.thread;
    thread.thread_position_in_threadgroup = at;
    thread.threadgroup_position_in_grid = position;
    thread.thread_position_in_grid = {position.x * size.x + at.x, position.y * size.y + at.y,
                                      position.z * size.z + at.z};
    thread.threads_per_grid = grid;
    thread.threads_per_threadgroup = here;
    thread.dispatch_threads_per_threadgroup = size;
    thread.threadgroups_per_grid = {(grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y,
                                    (grid.z + size.z - 1) / size.z};
    thread.thread_index_in_threadgroup = index;
    thread.thread_index_in_simdgroup = index % simd_width;
    thread.simdgroup_index_in_threadgroup = index / simd_width;
    thread.threads_per_simdgroup = simd_width;
    thread.simdgroups_per_threadgroup = static_cast<uint32_t>(launch->groups.size());
    fiber.state = State::ready;
    fiber.collective = nullptr;
    fiber.line = 0;
    prepare(fiber.context, stacks + index * stack_size, start_fiber);
    launch->groups[index / simd_width].lanes.push_back(&fiber);
  }
  std::vector<SimdGroup*> order;
  for (SimdGroup& group : launch->groups) order.push_back(&group);
  do {
    random.shuffle(order);
    for (SimdGroup* group : order) {
      run_simdgroup(*group, random);
      if (launch->failed) return;
    }
  } while (pass_barrier());
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
