// Threads of a block as fibers: switching between them, and what happens on an error.
#include "internal.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {
EmuFiber* emu_cur = nullptr;
emu_uint3 emu_block_dim, emu_grid_dim;
void emu_switch(void** save, void* load);
}
const KernelLaunch* emu_launch;
bool emu_failed, emu_scheduling;

// Saves the registers that a call must keep on the old stack, and loads them from the new one.
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int SAVED_REGISTERS = 6;

int emu_env(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

size_t emu_stack_size() {
  static size_t size = size_t(emu_env("EMU_STACK_KB", 256)) * 1024;
  return size;
}

static void* scheduler_sp;

void emu_to_scheduler() { emu_switch(&emu_cur->sp, scheduler_sp); }

void emu_resume(EmuFiber* f) {
  emu_cur = f;
  emu_switch(&scheduler_sp, f->sp);
  emu_cur = nullptr;
}

void emu_yield() {
  EmuFiber* self = emu_cur;
  EmuBlock* b = self->block;
  int end = std::min((self->linear & ~31) + 32, b->threads);
  for (int i = self->linear + 1; i < end; i++) {
    EmuFiber* f = &b->fibers[i];
    if (f->state != EMU_READY) continue;
    emu_cur = f;
    emu_switch(&self->sp, f->sp);
    return;
  }
  emu_to_scheduler();
}

void emu_prepare_stack(EmuFiber* f, char* base, void (*entry)()) {
  *(uint64_t*)base = 0; // must still be 0 at the thread's end
  // Staggered, so that the fibers' frames do not share cache sets.
  char* end = base + emu_stack_size() - (f->linear % 61) * 192 - 64;
  uint64_t* top = (uint64_t*)((uintptr_t)end & ~63ull);
  *--top = 0;               // so that the entry has a call's alignment
  *--top = (uint64_t)entry; // return address of the first switch
  for (int i = 0; i < SAVED_REGISTERS; i++) *--top = 0;
  f->sp = top;
}

std::string emu_where(const EmuFiber* f) {
  char text[400];
  snprintf(text, sizeof text, "%s, block (%u,%u,%u), thread (%u,%u,%u), line %d",
           emu_launch ? emu_launch->name : "no kernel", f->block_idx.x, f->block_idx.y, f->block_idx.z,
           f->thread_idx.x, f->thread_idx.y, f->thread_idx.z, f->line);
  return text;
}

extern "C" void emu_fail(const char* format, ...) {
  char text[2000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::string message = text;
  if (emu_cur) message += "\n  at " + emu_where(emu_cur);
  if (emu_launch) message += "\n  source " + std::string(emu_launch->source);
  fprintf(stderr, "EMU ERROR: %s\n", message.c_str());
  emu_failed = true;
  if (!emu_cur || emu_env("EMU_ABORT", 0)) abort();
  if (emu_scheduling) throw LaunchFailure();
  emu_to_scheduler();
  abort(); // a failed fiber is never resumed
}

static void on_fault(int number, siginfo_t* info, void*) {
  char text[1000];
  int n = snprintf(text, sizeof text, "EMU ERROR: signal %d, address %p%s%s\n  source %s\n", number,
                   info->si_addr, emu_cur ? "\n  at " : "", emu_cur ? emu_where(emu_cur).c_str() : "",
                   emu_launch ? emu_launch->source : "");
  if (write(2, text, std::min<size_t>(n, sizeof text))) {
  }
  signal(number, SIG_DFL);
  raise(number);
}

// Faults of a kernel say where they happened. Each host thread that launches needs a signal stack of its own.
void emu_catch_faults() {
  static thread_local bool done;
  if (done) return;
  done = true;
  constexpr size_t STACK = 65536;
  stack_t s = {};
  s.ss_sp = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  s.ss_size = STACK;
  sigaltstack(&s, nullptr);
  struct sigaction a = {};
  a.sa_sigaction = on_fault;
  a.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(number, &a, nullptr);
}
