// SPDX-License-Identifier: Apache-2.0
// all_gather_small: at most 64 KiB of any dtype from every rank to every rank, one launch. Tagged 8-byte words, so that
// every bit pattern may travel. Cost: twice the bytes on the wire; one launch. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/reduce.cuh"

namespace fv {
namespace {

constexpr int kThreads = 128;

template <bool kHooks>
__global__ void __launch_bounds__(kThreads) all_gather_small_kernel(
    const __grid_constant__ CommArgs args,
    const uint8_t* __restrict__ x,  // [local_ranks, n] bytes
    uint8_t* out,                   // [local_ranks, world, n]
    int64_t n) {
    const int local = blockIdx.y;
    Exchange<kHooks> exchange(args, local, reinterpret_cast<uint32_t*>(dynamic_shared()));
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t vectors = (n + 15) / 16;
    x += local * n;
    out += local * args.world * n;
    exchange.wipe_old_tags(thread, threads);
    for (int64_t i = thread; i < vectors; i += threads) {
        const uint4 v = load_vector(x, i, n);
        for (int k = 1; k < args.world && !exchange.failed; ++k) {
            const int peer = exchange.rank + k < args.world ? exchange.rank + k : exchange.rank + k - args.world;
            exchange.send(peer, kGatherRegion, i, v);
        }
        store_vector(out + exchange.rank * n, i, n, v);
    }
    exchange.finish(gridDim.x);
    for (int64_t i = thread; i < vectors; i += threads) {
        uint4 got[kMaxRanks];
        exchange.take(((1u << args.world) - 1) & ~(1u << exchange.rank), kGatherRegion, i, got);
#pragma unroll
        for (int r = 0; r < kMaxRanks; ++r) {
            if (r < args.world && r != exchange.rank) store_vector(out + r * n, i, n, got[r]);
        }
    }
}

void all_gather_small_cuda(const Tensor x, Tensor out, int64_t comm) {
    const char* op = "all_gather_small";
    const fv_comm& c = comm_of(op, comm);
    const int64_t n = check_gather_arguments(op, c, x, out);
    if (n == 0) return;
    const Launch launch(op, x);
    if (c.transport == kNccl) {
        nccl_all_gather_bytes(op, c, x.const_data_ptr(), out.mutable_data_ptr(), n, launch.stream);
        return;
    }
    const CommArgs args = comm_kernel_args(c, n);
    int64_t blocks = ceil_div((n + 15) / 16, kThreads);
    blocks = blocks < c.blocks ? blocks : c.blocks;
    auto kernel = comm_has_hooks(c) ? &all_gather_small_kernel<true> : &all_gather_small_kernel<false>;
    launch_comm(launch, c, kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(c.local_ranks)), kThreads, 16, args,
                cptr<uint8_t>(x), mptr<uint8_t>(out), n);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_gather_small", TORCH_BOX(&all_gather_small_cuda)); }

}  // namespace fv
