// Which fiber runs next: SIMD-groups in turn, each until it waits for the whole threadgroup.

#pragma once

#include "state.h"

namespace emulator {

inline void start_fiber() {
  launch->entry(launch->buffers, launch->running->thread);
  launch->running->state = State::done;
  leave();
}

inline void wait(State state, const char* collective, int line) {
  Fiber& fiber = *launch->running;
  fiber.state = state;
  fiber.collective = collective;
  fiber.line = line;
  switch_to(fiber.context, launch->scheduler);
}

inline void run_fiber(Fiber& fiber) {
  launch->running = &fiber;
  switch_to(launch->scheduler, fiber.context);
  launch->running = nullptr;
}

// Run a SIMD-group until all its threads have ended or wait for the whole threadgroup.
inline void run_simdgroup(SimdGroup& group, Random& random) {
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
inline bool pass_barrier() {
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

inline void run_threadgroup(Triple position, Triple grid, Triple size, uint64_t seed) {
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

}  // namespace emulator
