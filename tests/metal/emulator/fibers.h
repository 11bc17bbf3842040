// Fibers: functions that stop on a stack of their own and go on later.

#pragma once

#if !defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT  // slower, and everywhere
#endif
#if defined(EMULATOR_UCONTEXT) && defined(__APPLE__)
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif

#include <cstddef>

#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t stack_size = 128 << 10;

#ifdef EMULATOR_UCONTEXT

struct Context {
  ucontext_t place;
};

inline void switch_to(Context& from, Context& to) { swapcontext(&from.place, &to.place); }

inline void prepare(Context& context, char* stack, void (*start)()) {
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

inline void switch_to(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

inline void prepare(Context& context, char* stack, void (*start)()) {
  auto* top = reinterpret_cast<void**>(stack + stack_size);
  *--top = nullptr;  // where `start` would return to, which also aligns its frame
  *--top = reinterpret_cast<void*>(start);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

#endif

}  // namespace emulator
