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

// One lane of a warp asks until there() is true, the others wait for it: while a product takes its time, thousands of threads that ask
// for themselves would fill the link (over a mailbox that cost milliseconds, docs/performance.md).
template <bool kHooks, class There>
__device__ __forceinline__ void wait_as_one(Exchange<kHooks>& exchange, int asks, uint32_t pending, int stage, There there) {
    if (static_cast<int>(threadIdx.x % 32) == asks) {
        typename Exchange<kHooks>::Patience patience;
        while (!exchange.failed && !there()) {
            if (patience.spins > kPollsBeforeNap) __nanosleep(200);
            exchange.wait_on(patience, pending, stage);
        }
    }
    exchange.failed = __any_sync(kWarp, exchange.failed);
    __syncwarp();
}

template <class T>
__device__ __forceinline__ uint4 add_vectors(uint4 a, uint4 b) {
    constexpr int kN = Wire<T>::kElements;
    float f[kN], g[kN];
    Wire<T>::unpack(a, f);
    Wire<T>::unpack(b, g);
#pragma unroll
    for (int k = 0; k < kN; ++k) f[k] += g[k];
    return Wire<T>::pack(f);
}

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
    const uint32_t others = ((1u << world) - 1) & ~(1u << rank);

    // Vector i of a piece, `sum` of all ranks, to its place.
    auto put = [&](uint32_t piece, uint32_t i, const uint4 (&got)[kRanks]) {
        constexpr int kN = Wire<T>::kElements;
        float total[kN];
#pragma unroll
        for (int k = 0; k < kN; ++k) total[k] = -0.0f;  // -0 + x is x for every x, both zeros included
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
            if (r >= world) continue;
            float f[kN];
            Wire<T>::unpack(got[r], f);
#pragma unroll
            for (int k = 0; k < kN; ++k) total[k] += f[k];
        }
        const uint4 sum = escape(Wire<T>::pack(total), Wire<T>::kNan);
        const uint32_t row = i / row_vectors, at = (row * pieces + piece) * row_vectors + (i - row * row_vectors);
        to[at] = add ? add_vectors<T>(to[at], sum) : sum;
    };

#pragma unroll 1
    for (uint32_t piece = 0, begin = 0; piece < pieces; ++piece, begin += piece_vectors) {
        if (ready != nullptr) {  // is then the number of this call
            wait_as_one(exchange, 0, 1u << rank, 3, [&] { return ld_acquire(ready + piece) == exchange.epoch; });
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
            for (uint32_t i = first; i - lane < piece_vectors; i += kAtOnce * step) {  // whole warps
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
                    wait_as_one(exchange, 31 - __clz(static_cast<int>(late)), others, 0,
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
            if (first - lane < piece_vectors) {
                for (int r = 0; r < world; ++r) {
                    const uint8_t* slot = exchange.vector_at(rank, exchange.inbox + r * args.stride + begin + first - lane);
                    if (r != rank) wait_as_one(exchange, 0, 1u << r, 0, [&] { return has_arrived(ld_relaxed_sys_16(slot)); });
                }
            }
#pragma unroll 1
            for (uint32_t i = first; i < piece_vectors; i += step) {
                uint4 got[kRanks];
                const uint4 own = escape(from[begin + i], Wire<T>::kNan);
                exchange.take(others, 0, begin + i, got);
#pragma unroll
                for (int r = 0; r < kRanks; ++r) {
                    if (r == rank) got[r] = exchange.failed ? empty_vector() : own;
                }
                put(piece, i, got);
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
    launch_comm(launch, c, kernel, choice, 0, 0, args, cptr<T>(x), mptr<T>(out), reinterpret_cast<const uint32_t*>(cptr<int32_t>(ready)),
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
