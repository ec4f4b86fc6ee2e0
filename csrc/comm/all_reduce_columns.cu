// SPDX-License-Identifier: Apache-2.0
// all_reduce_columns: sum over ranks of a matrix that comes in pieces of columns, each sent as soon as it is there, one launch
// for all of them. Half of a block's warps send, the other half receives, so that the wire is used in both directions at once
// and neither waits for the other. It is launched before the products of the pieces: `ready` says how far they are.
// One-shot only. Cost: one launch; S bytes read, S written besides the exchange. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/all_reduce_columns.h"
#include "comm/launch_comm.h"
#include "comm/wire.cuh"

namespace fv {
namespace {

constexpr int kAtOnce = 4;  // loads of a thread on their way

constexpr uint32_t kWarp = 0xffffffffu;
constexpr uint32_t kPollsBeforeNap = 8;
constexpr uint32_t kNap = 500;  // ns between two looks at what comes over the link

// One lane of a warp asks until there() is true, the others wait for it.
template <bool kHooks, class There>
__device__ __forceinline__ void wait_as_one(Exchange<kHooks>& exchange, int asks, uint32_t pending, CommStage stage, uint32_t nap, There there) {
    if (static_cast<int>(threadIdx.x % 32) == asks) {
        typename Exchange<kHooks>::Patience patience;
        while (!exchange.failed && !there()) {
            if (patience.spins > kPollsBeforeNap) __nanosleep(nap);
            exchange.wait_on(patience, pending, stage);
        }
    }
    exchange.failed = __any_sync(kWarp, exchange.failed);
    __syncwarp();
}

// How far the receiving warps of a block may go: one of them, the watcher, asks for what comes last of a step, the others look at a word in
// shared memory. While a product runs beside, a few hundred lanes that ask over the link for what is not there slow down every access to
// memory, the product's too, a hundredfold (docs/performance.md).
struct Gate {
    static constexpr uint32_t kLost = 0xffffffffu;
    uint32_t* steps;    // that are there; only atomic accesses
    uint32_t step = 0;  // of this warp

    __device__ __forceinline__ void pass(bool watcher, bool& failed, uint32_t lane) {
        ++step;
        if (watcher) {
            if (lane == 0) {
                __threadfence_block();  // what the watcher has seen, the others see too
                atomicExch(steps, failed ? kLost : step);
            }
        } else {
            if (lane == 0) {
                uint32_t there;
                while ((there = atomicOr(steps, 0u)) < step) spin_pause();
                failed |= there == kLost;
                __threadfence_block();
            }
            failed = __any_sync(kWarp, failed);
        }
        __syncwarp();
    }
};

template <class T, int kRanks, bool kHooks>
__global__ void __launch_bounds__(512, 1) all_reduce_columns_kernel(
    const __grid_constant__ CommArgs args,
    const T* x,             // [local_ranks, pieces, rows, width]
    T* out,                 // [local_ranks, rows, pieces * width]; no part of x
    const uint32_t* ready,  // [pieces] or nullptr
    uint32_t pieces,
    uint32_t rows,
    uint32_t row_vectors,   // of a piece
    bool add) {             // to what is in out
    wait_for_previous_launch();
    allow_next_launch();
    const int local = blockIdx.y;
    const uint32_t piece_vectors = rows * row_vectors, vectors = pieces * piece_vectors;
    const uint32_t half = blockDim.x / 2, step = gridDim.x * half;
    const bool sends = threadIdx.x < half;
    const uint32_t lane = threadIdx.x % 32, first = blockIdx.x * half + (sends ? threadIdx.x : threadIdx.x - half);
    const uint4* from = reinterpret_cast<const uint4*>(x) + local * static_cast<int64_t>(vectors);
    uint4* to = reinterpret_cast<uint4*>(out) + local * static_cast<int64_t>(vectors);
    Exchange<kHooks> exchange(args, local, gridDim.x);
    exchange.begin();
    exchange.wipe_old_tags();
    exchange.failed = __any_sync(kWarp, exchange.failed);  // the same in a warp from here on
    const int world = args.world, rank = exchange.rank;
    const uint32_t all = (1u << world) - 1, others = all & ~(1u << rank);
    Gate gate{reinterpret_cast<uint32_t*>(dynamic_shared())};
    const bool watcher = threadIdx.x / 32 == half / 32;
    if (threadIdx.x == 0) *gate.steps = 0;
    __syncthreads();

    // Vector i of a piece, `sum` of all ranks, to its place.
    auto put = [&](uint32_t piece, uint32_t i, const uint4 (&got)[kRanks]) {
        const uint4 sum = escape(add_ranks<T, kRanks>(all, [&](int r) { return got[r]; }), Wire<T>::kNan);
        const uint32_t row = i / row_vectors, at = (row * pieces + piece) * row_vectors + (i - row * row_vectors);
        to[at] = add ? add_vectors<T>(to[at], sum) : sum;
    };

    // Of what a block sends and receives in one step, from vector `base` on: the last.
    auto last_of = [&](uint32_t base) {
        uint32_t at = base;
        for (int u = 1; u < kAtOnce && at + step < piece_vectors; ++u) at += step;
        return (at + half < piece_vectors ? at + half : piece_vectors) - 1;
    };

#pragma unroll 1
    for (uint32_t piece = 0, begin = 0; piece < pieces; ++piece, begin += piece_vectors) {
        if (ready != nullptr && (sends || watcher)) {  // is then the number of this call
            wait_as_one(exchange, 0, 1u << rank, kOwnProduct, 200, [&] { return ld_acquire(ready + piece) == exchange.epoch; });
        }
        if (sends) {
#pragma unroll 1
            for (uint32_t i = first; i < piece_vectors && !exchange.failed; i += kAtOnce * step) {
                uint4 v[kAtOnce];
#pragma unroll
                for (int u = 0; u < kAtOnce; ++u) {
                    if (i + u * step < piece_vectors) v[u] = escape(from[begin + i + u * step], Wire<T>::kNan);
                }
#pragma unroll 1
                for (int k = 1; k < world; ++k) {  // every rank starts at another peer
                    const int peer = rank + k < world ? rank + k : rank + k - world;
#pragma unroll
                    for (int u = 0; u < kAtOnce; ++u) {
                        if (i + u * step < piece_vectors) exchange.send(peer, 0, begin + i + u * step, v[u]);
                    }
                }
            }
        } else if constexpr (kRanks == 2) {  // one peer: several vectors on their way
            uint8_t* slot = exchange.vector_at(rank, exchange.inbox + (1 - rank) * args.stride + begin);
#pragma unroll 1
            for (uint32_t base = blockIdx.x * half; base < piece_vectors; base += kAtOnce * step) {
                const uint32_t i = base + threadIdx.x - half;
                if (watcher) wait_as_one(exchange, 0, others, kInputs, kNap, [&] { return has_arrived(ld_relaxed_sys_16(slot + uint64_t{last_of(base)} * 16)); });
                gate.pass(watcher, exchange.failed, lane);
                uint4 own[kAtOnce], other[kAtOnce];
                uint32_t wanted = 0;
#pragma unroll
                for (int u = 0; u < kAtOnce; ++u) {
                    if (i + u * step >= piece_vectors) continue;
                    own[u] = escape(from[begin + i + u * step], Wire<T>::kNan);
                    wanted |= 1u << u;
                }
                uint32_t pending = wanted;
                while (true) {
#pragma unroll
                    for (int u = 0; u < kAtOnce; ++u) {
                        if (pending >> u & 1) other[u] = ld_relaxed_sys_16(slot + uint64_t{i + u * step} * 16);
                    }
#pragma unroll
                    for (int u = 0; u < kAtOnce; ++u) {
                        if ((pending >> u & 1) && has_arrived(other[u])) pending &= ~(1u << u);
                    }
                    const uint32_t late = __ballot_sync(kWarp, pending != 0);
                    if (late == 0 || exchange.failed) break;
                    const uint64_t last = i + static_cast<uint32_t>(31 - __clz(static_cast<int>(pending | 1))) * step;  // sent last
                    wait_as_one(exchange, 31 - __clz(static_cast<int>(late)), others, kInputs, kNap,
                                [&] { return has_arrived(ld_relaxed_sys_16(slot + last * 16)); });
                }
#pragma unroll
                for (int u = 0; u < kAtOnce; ++u) {
                    if (!(wanted >> u & 1)) continue;
                    if (exchange.failed) other[u] = empty_vector();
                    else st_relaxed_sys_16(slot + uint64_t{i + u * step} * 16, empty_vector());
                    const uint4 got[2] = {rank == 0 ? own[u] : other[u], rank == 0 ? other[u] : own[u]};
                    put(piece, i + u * step, got);
                }
            }
        } else {
#pragma unroll 1
            for (uint32_t base = blockIdx.x * half; base < piece_vectors; base += kAtOnce * step) {
                if (watcher) {
                    for (int r = 0; r < world; ++r) {
                        const uint8_t* slot = exchange.vector_at(rank, exchange.inbox + r * args.stride + begin + last_of(base));
                        if (r != rank) wait_as_one(exchange, 0, 1u << r, kInputs, kNap, [&] { return has_arrived(ld_relaxed_sys_16(slot)); });
                    }
                }
                gate.pass(watcher, exchange.failed, lane);
#pragma unroll 1
                for (uint32_t i = base + threadIdx.x - half; i < piece_vectors && i < base + kAtOnce * step; i += step) {
                    uint4 got[kRanks];
                    const uint4 own = escape(from[begin + i], Wire<T>::kNan);
                    exchange.take(others, 0, begin + i, got);
#pragma unroll
                    for (int r = 0; r < kRanks; ++r) {
                        if (r == rank) got[r] = exchange.failed ? empty_vector() : own;
                    }
                    put(piece, i, got);
                }
                exchange.failed = __any_sync(kWarp, exchange.failed);
            }
        }
    }
    exchange.finish();
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, const OptTensor& ready, const ColumnsShape& s, bool add) {
    const CommArgs args = comm_kernel_args(c, kOneShot);
    const int64_t row_vectors = s.width * static_cast<int64_t>(sizeof(T)) / 16;
    const CommChoice choice = choose_columns(s.pieces * s.rows * row_vectors, most_comm_blocks(c, launch.props.sms));
    auto kernel = comm_has_hooks(c) ? &all_reduce_columns_kernel<T, kMaxRanks, true>
                : c.world == 2 ? &all_reduce_columns_kernel<T, 2, false> : &all_reduce_columns_kernel<T, kMaxRanks, false>;
    launch_comm(launch, c, kernel, choice, 0, 16, args, cptr<T>(x), mptr<T>(out), reinterpret_cast<const uint32_t*>(cptr<int32_t>(ready)),
                static_cast<uint32_t>(s.pieces), static_cast<uint32_t>(s.rows), static_cast<uint32_t>(row_vectors), add);
}

void all_reduce_columns_cuda(const Tensor x, Tensor out, const OptTensor ready, bool add, int64_t comm) {
    const char* op = "all_reduce_columns";
    const fv_comm& c = comm_of(op, comm);
    const ColumnsShape s = check_columns_arguments(op, c, x, out, ready);
    if (x.numel() == 0) return;
    const Launch launch(op, x);
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, out, ready, s, add);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, out, ready, s, add);
    else run<__nv_bfloat16>(launch, c, x, out, ready, s, add);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_reduce_columns", TORCH_BOX(&all_reduce_columns_cuda)); }

}  // namespace fv
