// SPDX-License-Identifier: Apache-2.0
// all_gather_small: at most 64 KiB of any dtype from every rank to every rank, one launch. Tagged 8-byte words, so that
// every bit pattern may travel. Cost: twice the bytes on the wire; one launch. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/wire.cuh"

namespace fv {
namespace {

template <bool kHooks>
__global__ void __launch_bounds__(512) all_gather_small_kernel(
    const __grid_constant__ CommArgs args,
    const uint8_t* __restrict__ x,  // [local_ranks, n] bytes
    uint8_t* out,                   // [local_ranks, world, n]
    int64_t n) {
    wait_for_previous_launch();
    allow_next_launch();
    const int local = blockIdx.y, world = args.world;
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const uint32_t vectors = static_cast<uint32_t>((n + 15) / 16);
    x += local * n;
    out += local * world * n;
    Exchange<kHooks> exchange(args, local, gridDim.x);
    exchange.begin();
    exchange.wipe_old_tags();
    for (uint32_t i = thread; i < vectors; i += threads) {
        const uint4 v = load_vector(x, i, n);
        for (int k = 1; k < world && !exchange.failed; ++k) {
            exchange.send_tagged(exchange.rank + k < world ? exchange.rank + k : exchange.rank + k - world, i, v);
        }
        store_vector(out + exchange.rank * n, i, n, v);
    }
    exchange.finish();
    // one vector of one rank at a time: ranks in parallel, like vectors
    for (uint32_t k = thread; k < vectors * (world - 1); k += threads) {
        const int other = k / vectors, source = other < exchange.rank ? other : other + 1;
        const uint32_t i = k % vectors;
        store_vector(out + source * n, i, n, exchange.take_tagged(source, i));
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
    const CommArgs args = comm_kernel_args(c, kOneShot);
    const int64_t vectors = (n + 15) / 16 * (c.world > 1 ? c.world - 1 : 1);
    const CommChoice choice = choose_all_reduce(vectors, most_comm_blocks(c, launch.props.sms));
    auto kernel = comm_has_hooks(c) ? &all_gather_small_kernel<true> : &all_gather_small_kernel<false>;
    launch_comm(launch, c, kernel, choice, 0, 0, args, cptr<uint8_t>(x), mptr<uint8_t>(out), n);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_gather_small", TORCH_BOX(&all_gather_small_cuda)); }

}  // namespace fv
