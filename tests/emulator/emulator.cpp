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
unsigned cluster_blocks = 1;

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

struct Block;
struct Thread : Fiber {
    void* sp = nullptr;
    State state = State::kDone;
    unsigned mask = 0;
    uint64_t value = 0;
    const char* what = "";
    uint64_t seen[32];  // what the lanes of the warp gave at the last exchange; private, so that no lane can run ahead
    Block* block = nullptr;
};

struct Block {
    uint3 index;
    std::vector<Thread> threads;
    std::vector<unsigned char> memory;
    unsigned char* dynamic = nullptr;
    int alive = 0, at_barrier = 0, barrier_sum = 0, barrier_result = 0;
    unsigned cluster_arrived = 0, cluster_phase = 0;  // of the cluster whose first block this is
};

unsigned char* stacks = nullptr;
size_t num_stacks = 0;
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
    Thread* me = static_cast<Thread*>(current);
    me->state = State::kDone;
    --me->block->alive;
    give_way();
    die("a finished thread ran again");
}

void start(Block& block, size_t first_stack, size_t smem) {
    block.memory.assign(smem + 1024, 0xff);  // NaN: shared memory starts undefined
    block.dynamic = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block.memory.data()) + 1023) & ~1023ull);
    block.threads.resize(block_dim.x * block_dim.y * block_dim.z);
    block.alive = static_cast<int>(block.threads.size());
    block.at_barrier = block.barrier_sum = 0;
    for (size_t i = 0; i < block.threads.size(); ++i) {
        Thread& t = block.threads[i];
        const unsigned u = static_cast<unsigned>(i);
        t.thread_idx = uint3{u % block_dim.x, u / block_dim.x % block_dim.y, u / (block_dim.x * block_dim.y)};
        t.linear = static_cast<int>(i);
        t.lane = t.linear % 32;
        t.warp = t.linear / 32;
        t.block = &block;
        uint64_t* top = reinterpret_cast<uint64_t*>(stacks + (first_stack + i + 1) * kStack) - 3;
        *top = 0;  // at entry rsp % 16 == 8, as after a call
        *--top = reinterpret_cast<uint64_t>(&entry);
        for (int r = 0; r < 6; ++r) *--top = 0;
        t.sp = top;
        t.state = State::kReady;
    }
}

void release_block_if_complete(Block& b) {
    if (b.alive == 0 || b.at_barrier < b.alive) return;  // exited threads do not take part
    b.barrier_result = b.barrier_sum;
    b.at_barrier = b.barrier_sum = 0;
    for (Thread& t : b.threads) {
        if (t.state == State::kBlock) t.state = State::kReady;
    }
}

// Lanes of one warp waiting with the same mask go on when every lane of the mask that is alive has come.
bool release_warps(Block& b) {
    bool any = false;
    const int count = static_cast<int>(b.threads.size());
    for (int w = 0; w * 32 < count; ++w) {
        Thread* lanes = &b.threads[w * 32];
        const int width = count - w * 32 < 32 ? count - w * 32 : 32;
        for (int l = 0; l < width; ++l) {
            Thread& t = lanes[l];
            if (t.state != State::kWarp) continue;
            bool complete = true;
            for (int k = 0; k < width && complete; ++k) {
                if (!(t.mask >> k & 1) || lanes[k].state == State::kDone) continue;
                complete = lanes[k].state == State::kWarp && lanes[k].mask == t.mask;
                if (complete && lanes[k].what != t.what) die(std::string(t.what) + " meets " + lanes[k].what + " in one warp");
            }
            if (!complete) continue;
            const unsigned mask = t.mask;
            uint64_t values[32] = {};
            for (int k = 0; k < width; ++k) {
                if ((mask >> k & 1) && lanes[k].state == State::kWarp) values[k] = lanes[k].value;
            }
            for (int k = 0; k < width; ++k) {
                if (!(mask >> k & 1) || lanes[k].state != State::kWarp) continue;
                std::memcpy(lanes[k].seen, values, sizeof(values));
                lanes[k].state = State::kReady;
            }
            any = true;
        }
    }
    return any;
}

// Runs every thread of the block that can run, once. False if none could and nothing was released.
bool step(Block& b) {
    bool progress = false;
    block_idx = b.index;
    dynamic_memory = b.dynamic;
    for (Thread& t : b.threads) {
        if (t.state != State::kReady) continue;
        progress = true;
        current = &t;
        emu_switch(&scheduler_sp, t.sp);
    }
    release_block_if_complete(b);
    return release_warps(b) || progress;
}

void need_stacks(size_t count) {
    if (count <= num_stacks) return;
    if (stacks) munmap(stacks, kStack * num_stacks);
    stacks = static_cast<unsigned char*>(
        mmap(nullptr, kStack * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) die("no memory for fibers");
    num_stacks = count;
}

}  // namespace

int block_barrier(int value) {
    Thread* me = static_cast<Thread*>(current);
    Block& b = *me->block;
    me->state = State::kBlock;
    ++b.at_barrier;
    b.barrier_sum += value;
    release_block_if_complete(b);
    give_way();
    return b.barrier_result;
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
        if ((mask >> i & 1) && from[i]) {
            std::memcpy(static_cast<char*>(all) + i * bytes, reinterpret_cast<const void*>(from[i]), bytes);
        }
    }
    warp_exchange(mask, 0, "warp_share end");
}

void spin() { give_way(); }

namespace {

// Blocks that wait for each other: any block may fall behind for a while. Returns when all have ended.
void run_together(std::vector<Block>& blocks) {
    static uint64_t random = 0x9e3779b97f4a7c15ull;
    for (size_t left = blocks.size(); left > 0;) {
        left = 0;
        for (Block& b : blocks) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            if (b.alive > 0 && (random & 3)) step(b);
            left += b.alive > 0;
        }
    }
}

std::vector<Block>* running_cluster = nullptr;

// Of the running block's cluster: its first block in running_cluster. Resident grids hold many clusters at a time.
size_t cluster_base() {
    const size_t block = block_idx.x + static_cast<size_t>(grid_dim.x) * (block_idx.y + static_cast<size_t>(grid_dim.y) * block_idx.z);
    return running_cluster->size() == cluster_blocks ? 0 : block / cluster_blocks * cluster_blocks;
}

}  // namespace

void cluster_barrier() {
    if (cluster_blocks == 1) {
        block_barrier(0);
        return;
    }
    block_barrier(0);
    if (static_cast<Thread*>(current)->linear == 0) {
        Block& first = (*running_cluster)[cluster_base()];
        const unsigned phase = first.cluster_phase;
        if (++first.cluster_arrived == cluster_blocks) {
            first.cluster_arrived = 0;
            ++first.cluster_phase;
        }
        while (first.cluster_phase == phase) spin();
    }
    block_barrier(0);
}

unsigned char* cluster_memory(unsigned rank) {
    return cluster_blocks == 1 ? dynamic_memory : (*running_cluster)[cluster_base() + rank].dynamic;
}

void run_grid(dim3 grid, dim3 block, size_t smem, bool resident, unsigned cluster, const std::function<void()>& body) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    kernel_body = &body;
    grid_dim = grid;
    block_dim = block;
    cluster_blocks = cluster;
    const size_t threads = block.x * block.y * block.z;
    const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    const size_t together = resident ? blocks : cluster;
    need_stacks(together > 1 ? threads * together : static_cast<size_t>(kMaxThreads));
    std::vector<Block> alive(together);
    running_cluster = &alive;
    for (size_t i = 0; i < blocks; ++i) {
        Block& b = alive[i % together];
        const unsigned u = static_cast<unsigned>(i);
        b.index = uint3{u % grid.x, u / grid.x % grid.y, u / (grid.x * grid.y)};
        start(b, i % together * threads, smem);
        if (together > 1) {
            if (i % together == together - 1) run_together(alive);
            continue;
        }
        while (b.alive > 0) {
            if (!step(b) && b.alive > 0) {
                die("deadlock: " + std::to_string(b.at_barrier) + " of " + std::to_string(b.alive) +
                    " threads wait at a block barrier, the others for lanes that never come");
            }
        }
    }
    current = nullptr;
}

}  // namespace emu
