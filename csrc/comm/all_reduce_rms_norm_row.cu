// SPDX-License-Identifier: Apache-2.0
// all_reduce_rms_norm where it counts: few rows, one hop, a team of blocks per row and one 16-byte vector per thread, which
// stays in registers from the send to the norm. Same bits as the general kernel (all_reduce_rms_norm.cu).
#include "comm/all_reduce_rms_norm.h"
#include "comm/launch_comm.h"
#include "comm/reduce.cuh"
#include "comm/row_norm.cuh"

namespace fv {
namespace {

template <class T, int kRanks>
__global__ void __launch_bounds__(most_register_threads(kRanks), 1) all_reduce_rms_norm_row_kernel(
    const __grid_constant__ CommArgs args, const __grid_constant__ RowNorm<T> call) {
    if (call.only_pulls_weights(args)) return;
    const int local = blockIdx.y, row = call.team();
    const uint32_t j = call.first_vector();
    const Vectors<const T> weight(call.weight, call.hidden);
    const bool has = j < weight.count();
    const RowSums sums(dynamic_shared(), weight.count(), call.cluster(), j);
    sums.begin();
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const uint4 scales = has ? weight.load(j) : zero;  // nobody's output, so before the wait
    wait_for_previous_launch();
    allow_next_launch();
    const int64_t offset = (static_cast<int64_t>(local) * call.rows + row) * call.hidden;
    Exchange<false> exchange(args, local, call.work_blocks);
    Sum<T, kRanks, false> sum(exchange, call.x + offset, call.hidden, row);
    const Vectors<T> residual(call.residual + offset, call.hidden);
    uint4 v = has ? sum.x.load(j) : zero;  // on its way while the epoch is
    const uint4 old = has ? residual.load(j) : zero;
    exchange.begin();
    exchange.wipe_old_tags();
    v = escape(v, Wire<T>::kNan);
    if (has) sum.offer(j, v);
    exchange.finish();
    float squares = 0.0f;
    if (has) {
        v = add_residual<T>(sum.reduce(j, v), old, squares);
        residual.store(j, v);
    }
    sums.all_have_begun();
    sums.post(squares, j, 0);
    sums.wait(0, 0);
    const float scale = sums.scale(0, call.inverse_hidden, call.eps);
    if (has) Vectors<T>(call.out + offset, call.hidden).store(j, normalized<T>(v, scales, scale));
    call.stop_prefetch(exchange);
}

}  // namespace

template <class T>
void all_reduce_rms_norm_row(const Launch& launch, const fv_comm& c, const CommChoice& choice, const CommArgs& args, const RowNorm<T>& call) {
    auto kernel = c.world <= 2 ? &all_reduce_rms_norm_row_kernel<T, 2> : &all_reduce_rms_norm_row_kernel<T, kMaxRanks>;
    const int64_t vectors = (call.hidden * static_cast<int64_t>(sizeof(T)) + 15) / 16;
    launch_comm(launch, c, kernel, choice, choice.prefetch_blocks, RowSums::bytes(static_cast<uint32_t>((vectors + 31) / 32)), args, call);
}
template void all_reduce_rms_norm_row(const Launch&, const fv_comm&, const CommChoice&, const CommArgs&, const RowNorm<float>&);
template void all_reduce_rms_norm_row(const Launch&, const fv_comm&, const CommChoice&, const CommArgs&, const RowNorm<__half>&);
template void all_reduce_rms_norm_row(const Launch&, const fv_comm&, const CommChoice&, const CommArgs&, const RowNorm<__nv_bfloat16>&);

}  // namespace fv
