// SPDX-License-Identifier: Apache-2.0
// all_reduce: out = sum over ranks of x, one launch. Each rank pushes 16-byte vectors into the slots of its peers and
// polls its own (protocol.cuh); one-shot sends (W - 1) S bytes in one hop, two-shot 2 (W - 1) / W S bytes in two.
// Cost: one launch; S bytes read and written besides the exchange. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/reduce.cuh"

namespace fv {
namespace {

constexpr int kThreads = 128;

template <class T, bool kHooks>
__global__ void __launch_bounds__(kThreads) all_reduce_kernel(
    const __grid_constant__ CommArgs args,
    const T* __restrict__ x,  // [local_ranks, n]
    T* out,                   // [local_ranks, n]
    int64_t n) {
    const int local = blockIdx.y;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    x += local * n;
    T* to = out + local * n;
    const bool early = !args.two_shot && thread * Wire<T>::kElements < n;
    const uint4 first = early ? load_vector(x, thread, n) : make_uint4(0, 0, 0, 0);
    Exchange<kHooks> exchange(args, local, reinterpret_cast<uint32_t*>(dynamic_shared()));
    Segment<T, kHooks> segment{exchange, x, n, 0, thread, threads, first, early ? thread : -1};
    auto sink = [&](int64_t j, uint4 v) { store_vector(to, j, n, v); };
    exchange.wipe_old_tags(thread, threads);
    if (!exchange.failed) segment.send_input();
    exchange.finish(gridDim.x);
    segment.reduce(sink);
    segment.gather(sink);
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, int64_t n) {
    const CommArgs args = comm_kernel_args(c, n * static_cast<int64_t>(sizeof(T)));
    const int64_t vectors = (n * static_cast<int64_t>(sizeof(T)) + 15) / 16;
    const int64_t shares = args.two_shot ? (vectors + c.world - 1) / c.world : vectors;
    int64_t blocks = ceil_div(shares, kThreads);
    blocks = blocks < c.blocks ? blocks : c.blocks;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(c.local_ranks));
    auto kernel = comm_has_hooks(c) ? &all_reduce_kernel<T, true> : &all_reduce_kernel<T, false>;
    launch_comm(launch, c, kernel, grid, kThreads, 16, args, cptr<T>(x), mptr<T>(out), n);
}

void all_reduce_cuda(const Tensor x, Tensor out, int64_t comm) {
    const char* op = "all_reduce";
    const fv_comm& c = comm_of(op, comm);
    const int64_t n = check_reduce_input(op, c, x);
    check_like(op, "out", out, x);
    if (n == 0) return;
    const Launch launch(op, x);
    if (c.transport == kNccl) {
        nccl_all_reduce(op, c, x.const_data_ptr(), out.mutable_data_ptr(), n, x.scalar_type(), launch.stream);
        return;
    }
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, out, n);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, out, n);
    else run<__nv_bfloat16>(launch, c, x, out, n);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_reduce", TORCH_BOX(&all_reduce_cuda)); }

}  // namespace fv
