// SPDX-License-Identifier: Apache-2.0
// all_reduce_rms_norm: residual += sum over ranks of x, out = RMSNorm(residual) * weight, one launch; blocks beyond the
// exchange pull weights that the next kernel will read into L2 meanwhile.
// A row belongs to one block (or a cluster: comm_choice.h), a vector of it to one thread, from the send to the norm; the
// exchange is that of all_reduce, so its bits are too. The sum of squares is taken over runs of 32 vectors, then over the
// runs: an order that depends on H alone. Cost: one launch. Graph-safe. Here: any form, any number of rows; short calls take
// all_reduce_rms_norm_row.cu.
#include <torch/csrc/stable/library.h>

#include "comm/add_rms_norm.h"
#include "comm/all_reduce_fp8.h"
#include "comm/all_reduce_rms_norm.h"
#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/reduce.cuh"

namespace fv {
namespace {

// Shared memory of a block: sums of squares, then this block's vectors of the row.
struct RowMemory {
    static int64_t bytes(int64_t row_vectors, const CommChoice& choice) {
        const int64_t step = int64_t{choice.threads} * choice.cluster, vectors_of_thread = (row_vectors + step - 1) / step;
        return RowSums::bytes(static_cast<uint32_t>((row_vectors + 31) / 32)) + vectors_of_thread * choice.threads * 16;
    }
};

template <class T, int kRanks, bool kHooks>
__global__ void __launch_bounds__(most_row_threads(kRanks), 1) all_reduce_rms_norm_kernel(
    const __grid_constant__ CommArgs args, const __grid_constant__ RowNorm<T> call) {
    if (call.only_pulls_weights(args)) return;
    const int local = blockIdx.y, cluster = call.cluster(), lane = threadIdx.x & 31, rows = call.rows, hidden = call.hidden;
    const int team = call.team(), teams = call.work_blocks >> call.cluster_log2;
    const Vectors<const T> weights(call.weight, hidden);
    const uint32_t vectors = weights.count(), step = cluster * blockDim.x;
    const uint32_t mine = call.first_vector();  // this thread's first vector of every row
    const RowSums sums(dynamic_shared(), vectors, cluster, mine);
    sums.begin();
    uint4* const row_vectors = reinterpret_cast<uint4*>(dynamic_shared() + RowSums::bytes(sums.runs)) + threadIdx.x;
    const int64_t offset = static_cast<int64_t>(local) * rows * hidden;
    const T* const x = call.x + offset;
    T *const residual = call.residual + offset, *const out = call.out + offset;

    // the first vector of the first row, and all that its norm needs, on its way before the epoch is known
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool early = mine < vectors;
    const uint4 early_weight = early ? weights.load(mine) : zero;  // a weight is nobody's output
    wait_for_previous_launch();
    allow_next_launch();
    Exchange<kHooks> exchange(args, local, call.work_blocks);
    const int64_t first = static_cast<int64_t>(team) * hidden;
    uint4 early_x = early ? load_vector(x + first, mine, hidden) : zero;
    const uint4 early_residual = early ? load_vector(residual + first, mine, hidden) : zero;
    exchange.begin();
    early_x = escape(early_x, Wire<T>::kNan);
    exchange.wipe_old_tags();
    auto sum_of = [&](int row) { return Sum<T, kRanks, kHooks>(exchange, x + static_cast<int64_t>(row) * hidden, hidden, row); };
    auto own = [&](const Sum<T, kRanks, kHooks>& sum, int row, uint32_t j) { return row == team && j == mine ? early_x : sum.load(j); };

#pragma unroll 1
    for (int row = team; row < rows; row += teams) {
        const Sum<T, kRanks, kHooks> sum = sum_of(row);
#pragma unroll 1
        for (uint32_t j = mine; j < vectors; j += step) sum.offer(j, own(sum, row, j));
    }
    exchange.finish();
    sums.all_have_begun();
    // What this rank owns: one-shot all of a row when its turn comes; else of all rows before it waits for other owners. It
    // stays in shared memory until its norm, or in `out` if there are more rows than teams.
    const bool one_shot = kRanks <= 2 || args.form == kOneShot, kept = one_shot || teams >= rows;
    int ahead = team;
#pragma unroll 1
    for (int row = team, number = 0; row < rows; row += teams, ++number) {
        const int odd = number & 1;
#pragma unroll 1
        for (const int until = one_shot ? row + 1 : rows; ahead < until; ahead += teams) {
            Sum<T, kRanks, kHooks> sum = sum_of(ahead);
            uint4* keep = row_vectors;
#pragma unroll 1
            for (uint32_t j = mine; j < vectors; j += step, keep += blockDim.x) {
                if (!sum.mine(j)) continue;
                const uint4 v = sum.reduce(j, own(sum, ahead, j));
                if (kept) *keep = v;
                else store_vector(out + static_cast<int64_t>(ahead) * hidden, j, hidden, v);
            }
        }
        Sum<T, kRanks, kHooks> sum = sum_of(row);
        const Vectors<T> row_residual(residual + static_cast<int64_t>(row) * hidden, hidden);
        const Vectors<T> row_out(out + static_cast<int64_t>(row) * hidden, hidden);
        uint4* keep = row_vectors;
#pragma unroll 1
        for (uint32_t j = mine; j - lane < vectors; j += step, keep += blockDim.x) {  // whole warps
            float squares = 0.0f;
            if (j < vectors) {
                const uint4 old = row == team && j == mine ? early_residual : row_residual.load(j);
                *keep = add_residual<T>(!sum.mine(j) ? sum.receive(j) : kept ? *keep : row_out.load(j), old, squares);
                row_residual.store(j, *keep);
            }
            sums.post(squares, j, odd);
        }
        sums.wait(odd, number >> 1 & 1);
        const float scale = sums.scale(odd, call.inverse_hidden, call.eps);
        keep = row_vectors;
#pragma unroll 1
        for (uint32_t j = mine; j < vectors; j += step, keep += blockDim.x) {
            row_out.store(j, normalized<T>(*keep, j == mine ? early_weight : weights.load(j), scale));
        }
    }
    call.stop_prefetch(exchange);
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& residual, const Tensor& weight,
         const Tensor& out, const OptTensor& prefetch, int64_t rows, int64_t hidden, float eps) {
    const int64_t size = sizeof(T), row_vectors = (hidden * size + 15) / 16;
    const CommForm form = comm_form(c, rows * hidden * size);
    const CommArgs args = comm_kernel_args(c, form);
    const int64_t ranges = prefetch ? prefetch->size(0) : 0;
    const CommChoice choice = choose_rms_norm(rows, row_vectors, c, launch.props.major, launch.props.sms, form, ranges > 0);
    const int64_t memory = RowMemory::bytes(row_vectors, choice);
    FV_CHECK(memory <= launch.props.max_smem, launch.op, ": x must have rows of at most ", (launch.props.max_smem - 9216) / size,
             " elements; got ", hidden, ". Fix: all_reduce, then the norm.");
    const RowNorm<T> call = {cptr<T>(x), mptr<T>(residual), cptr<T>(weight), mptr<T>(out), cptr<int64_t>(prefetch), ranges,
                             static_cast<int>(rows), static_cast<int>(hidden), 1.0f / static_cast<float>(hidden), eps, choice.blocks,
                             log2_of(choice.cluster)};
    if (choice.registers) return all_reduce_rms_norm_row<T>(launch, c, choice, args, call);
    auto kernel = comm_has_hooks(c) ? &all_reduce_rms_norm_kernel<T, kMaxRanks, true>
                : c.world <= 2 && args.form == kOneShot ? &all_reduce_rms_norm_kernel<T, 2, false>
                : c.world <= 4 ? &all_reduce_rms_norm_kernel<T, 4, false> : &all_reduce_rms_norm_kernel<T, kMaxRanks, false>;
    launch_comm(launch, c, kernel, choice, choice.prefetch_blocks, static_cast<size_t>(memory), args, call);
}

void all_reduce_rms_norm_cuda(const Tensor x, Tensor residual, const Tensor weight, Tensor out, const OptTensor prefetch,
                              int64_t comm, double eps) {
    const char* op = "all_reduce_rms_norm";
    const fv_comm& c = comm_of(op, comm);
    const NormShape shape = check_norm_arguments(op, c, x, residual, weight, out, prefetch);
    if (shape.rows == 0) return;
    const Launch launch(op, x);
    const int64_t n = shape.rows * shape.hidden;
    const bool fp8 = n * static_cast<int64_t>(x.element_size()) > c.fp8_bytes;
    if (fp8 || c.transport == kNccl) {  // two launches
        if (fp8) all_reduce_fp8(launch, c, x, out, n);
        else nccl_all_reduce(op, c, x.const_data_ptr(), out.mutable_data_ptr(), n, x.scalar_type(), launch.stream);
        launch_add_rms_norm(launch, x.scalar_type(), weight.const_data_ptr(), residual.mutable_data_ptr(),
                            out.mutable_data_ptr(), shape.rows * c.local_ranks, shape.hidden, static_cast<float>(eps));
        return;
    }
    const float e = static_cast<float>(eps);
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
    else run<__nv_bfloat16>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_reduce_rms_norm", TORCH_BOX(&all_reduce_rms_norm_cuda)); }

}  // namespace fv
