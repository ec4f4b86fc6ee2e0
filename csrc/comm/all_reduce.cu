// SPDX-License-Identifier: Apache-2.0
// all_reduce: out = sum over ranks of x, one launch. Each rank pushes 16-byte vectors into the slots of its peers and
// polls its own (protocol.cuh); the forms are those of CommForm (fv_comm.h). Cost: one launch; S bytes read and written
// besides the exchange. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/all_reduce_fp8.h"
#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/reduce.cuh"

namespace fv {
namespace {

template <class T, int kRanks, bool kHooks>
__global__ void __launch_bounds__(512, 1) all_reduce_kernel(
    const __grid_constant__ CommArgs args,
    const T* x,  // [local_ranks, n]; may be out
    T* out,      // [local_ranks, n]
    int64_t n) {
    wait_for_previous_launch();
    allow_next_launch();
    const int local = blockIdx.y;
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
    const Vectors<T> to(out + local * n, n);
    Exchange<kHooks> exchange(args, local, gridDim.x);
    Sum<T, kRanks, kHooks> sum(exchange, x + local * n, n);
    const uint32_t first_j = thread < sum.vectors ? sum.turn(thread) : kEmpty;  // loaded while the epoch is on its way
    uint4 first = first_j != kEmpty ? sum.x.load(first_j) : empty_vector();
    exchange.begin();
    first = escape(first, Wire<T>::kNan);
    auto own = [&](uint32_t j) { return j == first_j ? first : sum.load(j); };
    exchange.wipe_old_tags();
#pragma unroll 1
    for (uint32_t k = thread; k < sum.vectors; k += threads) sum.offer(sum.turn(k), own(sum.turn(k)));
    exchange.finish();
#pragma unroll 1
    for (uint32_t j = sum.begin + thread; j < sum.end; j += threads) to.store(j, sum.reduce(j, own(j)));
    if (sum.one_shot()) return;
    const uint32_t others = sum.vectors - (sum.end - sum.begin);
#pragma unroll 1
    for (uint32_t k = thread; k < others; k += threads) {
        const uint32_t j = sum.turn(k);
        to.store(j, sum.receive(j));
    }
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, int64_t n) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    const CommArgs args = comm_kernel_args(c, comm_form(c, bytes));
    const CommChoice choice = choose_all_reduce((bytes + 15) / 16, most_comm_blocks(c, launch.props.sms));
    auto kernel = comm_has_hooks(c) ? &all_reduce_kernel<T, kMaxRanks, true> : c.world <= 2 && args.form == kOneShot ? &all_reduce_kernel<T, 2, false>
                : c.world <= 4 ? &all_reduce_kernel<T, 4, false> : &all_reduce_kernel<T, kMaxRanks, false>;
    launch_comm(launch, c, kernel, choice, 0, 0, args, cptr<T>(x), mptr<T>(out), n);
}

void all_reduce_cuda(const Tensor x, Tensor out, int64_t comm) {
    const char* op = "all_reduce";
    const fv_comm& c = comm_of(op, comm);
    const int64_t n = check_reduce_input(op, c, x);
    check_like(op, "out", out, x);
    check_apart_or_same(op, c, "out", out, x);
    if (n == 0) return;
    const Launch launch(op, x);
    if (c.transport == kNccl) {
        nccl_all_reduce(op, c, x.const_data_ptr(), out.mutable_data_ptr(), n, x.scalar_type(), launch.stream);
        return;
    }
    if (n * static_cast<int64_t>(x.element_size()) > c.fp8_bytes) return all_reduce_fp8(launch, c, x, out, n);
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, out, n);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, out, n);
    else run<__nv_bfloat16>(launch, c, x, out, n);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_reduce", TORCH_BOX(&all_reduce_cuda)); }

}  // namespace fv
