// SPDX-License-Identifier: Apache-2.0
// Fibers, barriers and warp exchanges of the emulator. See emulator.h.
#include "emulator.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace emu {

Fiber* current = nullptr;
uint3 block_idx;
dim3 block_dim, grid_dim;
unsigned char* dynamic_memory = nullptr;

namespace {

constexpr size_t kStack = 128 * 1024;

// Saves the callee-saved registers on the stack and changes stacks (System V x86-64).
extern "C" void emu_switch(void** save_sp, void* load_sp);
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
.size emu_switch,.-emu_switch
)");

enum class State { kReady, kBlock, kWarp, kDone };

struct Thread : Fiber {
    void* sp = nullptr;
    State state = State::kDone;
    unsigned mask = 0;
    uint64_t value = 0;
    const char* what = "";
    uint64_t seen[32];  // what the lanes of the warp gave at the last exchange; private, so that no lane can run ahead
};

Thread threads[kMaxThreads];
unsigned char* stacks = nullptr;
int num_threads = 0, alive = 0, at_barrier = 0, barrier_sum = 0, barrier_result = 0;
void* scheduler_sp = nullptr;
const std::function<void()>* kernel_body = nullptr;

[[noreturn]] void die(const std::string& why) {
    std::fprintf(stderr, "emulator: block (%u, %u, %u): %s\n", block_idx.x, block_idx.y, block_idx.z, why.c_str());
    std::abort();
}

void give_way() {
    Thread* me = static_cast<Thread*>(current);
    emu_switch(&me->sp, scheduler_sp);
}

void entry() {
    (*kernel_body)();
    static_cast<Thread*>(current)->state = State::kDone;
    --alive;
    give_way();
    die("a finished thread ran again");
}

void start(Thread& t, int i) {
    uint64_t* top = reinterpret_cast<uint64_t*>(stacks + (static_cast<size_t>(i) + 1) * kStack) - 3;
    *top = 0;  // alignment: at entry rsp % 16 == 8
    *--top = reinterpret_cast<uint64_t>(&entry);
    for (int r = 0; r < 6; ++r) *--top = 0;
    t.sp = top;
    t.state = State::kReady;
}

void release_block_if_complete() {
    if (alive == 0 || at_barrier < alive) return;  // exited threads do not take part
    barrier_result = barrier_sum;
    at_barrier = barrier_sum = 0;
    for (int i = 0; i < num_threads; ++i) {
        if (threads[i].state == State::kBlock) threads[i].state = State::kReady;
    }
}

// Lanes of one warp waiting with the same mask go on when every lane of the mask that is alive has come.
bool release_warps() {
    bool any = false;
    for (int w = 0; w * 32 < num_threads; ++w) {
        for (int l = 0; l < 32 && w * 32 + l < num_threads; ++l) {
            Thread& t = threads[w * 32 + l];
            if (t.state != State::kWarp) continue;
            bool complete = true;
            for (int k = 0; k < 32 && complete; ++k) {
                if (!(t.mask >> k & 1) || w * 32 + k >= num_threads) continue;
                const Thread& o = threads[w * 32 + k];
                if (o.state == State::kDone) continue;
                complete = o.state == State::kWarp && o.mask == t.mask;
                if (complete && o.what != t.what) die(std::string(t.what) + " meets " + o.what + " in one warp");
            }
            if (!complete) continue;
            const unsigned mask = t.mask;
            uint64_t values[32] = {};
            for (int k = 0; k < 32 && w * 32 + k < num_threads; ++k) {
                if ((mask >> k & 1) && threads[w * 32 + k].state == State::kWarp) values[k] = threads[w * 32 + k].value;
            }
            for (int k = 0; k < 32 && w * 32 + k < num_threads; ++k) {
                Thread& o = threads[w * 32 + k];
                if (!(mask >> k & 1) || o.state != State::kWarp) continue;
                std::memcpy(o.seen, values, sizeof(values));
                o.state = State::kReady;
            }
            any = true;
        }
    }
    return any;
}

}  // namespace

int block_barrier(int value) {
    Thread* me = static_cast<Thread*>(current);
    me->state = State::kBlock;
    ++at_barrier;
    barrier_sum += value;
    release_block_if_complete();
    give_way();
    return barrier_result;
}

const uint64_t* warp_exchange(unsigned mask, uint64_t value, const char* what) {
    Thread* me = static_cast<Thread*>(current);
    if (!(mask >> me->lane & 1)) die(std::string(what) + ": a lane outside its own mask");
    me->state = State::kWarp;
    me->mask = mask;
    me->value = value;
    me->what = what;
    give_way();
    return me->seen;
}

void warp_share(unsigned mask, const void* mine, size_t bytes, void* all) {
    // pointers travel; every lane copies from the others before any of them may go on
    uint64_t from[32];
    std::memcpy(from, warp_exchange(mask, reinterpret_cast<uint64_t>(mine), "warp_share"), sizeof(from));
    for (int i = 0; i < 32; ++i) {
        if ((mask >> i & 1) && from[i]) std::memcpy(static_cast<char*>(all) + i * bytes, reinterpret_cast<const void*>(from[i]), bytes);
    }
    warp_exchange(mask, 0, "warp_share end");
}

void run_grid(dim3 grid, dim3 block, size_t smem, const std::function<void()>& body) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    static unsigned char* memory = nullptr;
    constexpr size_t kMemory = 256 * 1024;
    if (!stacks) {
        stacks = static_cast<unsigned char*>(
            mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        memory = static_cast<unsigned char*>(std::aligned_alloc(1024, kMemory));
        if (stacks == MAP_FAILED || !memory) die("no memory for fibers");
    }
    kernel_body = &body;
    grid_dim = grid;
    block_dim = block;
    dynamic_memory = memory;
    num_threads = static_cast<int>(block.x * block.y * block.z);
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                block_idx = uint3{x, y, z};
                std::memset(memory, 0xff, smem);  // NaN: shared memory starts undefined
                for (int i = 0; i < num_threads; ++i) {
                    Thread& t = threads[i];
                    const unsigned u = static_cast<unsigned>(i);
                    t.thread_idx = uint3{u % block.x, u / block.x % block.y, u / (block.x * block.y)};
                    t.linear = i;
                    t.lane = i % 32;
                    t.warp = i / 32;
                    start(t, i);
                }
                alive = num_threads;
                at_barrier = barrier_sum = 0;
                while (alive > 0) {
                    bool progress = false;
                    for (int i = 0; i < num_threads; ++i) {
                        if (threads[i].state != State::kReady) continue;
                        progress = true;
                        current = &threads[i];
                        emu_switch(&scheduler_sp, threads[i].sp);
                    }
                    release_block_if_complete();
                    if (release_warps() || progress) continue;
                    if (alive > 0 && at_barrier == 0) die("deadlock: lanes wait for others that never come");
                    if (alive > 0) die("deadlock: " + std::to_string(at_barrier) + " of " + std::to_string(alive) +
                                       " threads wait at a block barrier");
                }
            }
        }
    }
    current = nullptr;
}

}  // namespace emu
