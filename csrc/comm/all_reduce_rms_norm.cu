// SPDX-License-Identifier: Apache-2.0
// all_reduce_rms_norm: residual += sum over ranks of x, out = RMSNorm(residual) * weight, one launch; blocks beyond the
// exchange pull weights that the next kernel will read into L2 meanwhile.
// One block per row keeps the row in shared memory; the exchange is that of all_reduce, so its bits are too. The sum of
// squares is taken in an order that depends on H alone. Cost: one launch. Graph-safe.
#include <torch/csrc/stable/library.h>

#include "comm/add_rms_norm.h"
#include "comm/launch_comm.h"
#include "comm/nccl_path.h"
#include "comm/reduce.cuh"

namespace fv {
namespace {

constexpr int kThreads = 384;  // so that 168 registers a thread are allowed
constexpr int kEarly = 3;  // vectors per thread that are loaded before the sum is there: H = 7168 in 16-bit types
constexpr int kPrefetchBlocks = 32;
constexpr int64_t kLine = 128;

// table: [ranges][2] = address, bytes
__device__ void prefetch_ranges(const int64_t* table, int64_t ranges, int64_t thread, int64_t threads) {
    for (int64_t r = 0; r < ranges; ++r) {
        const char* begin = reinterpret_cast<const char*>(table[2 * r]);
        const int64_t lines = (table[2 * r + 1] + kLine - 1) / kLine;
        for (int64_t i = thread; i < lines; i += threads) prefetch_l2(begin + i * kLine);
    }
}

template <class T, bool kHooks>
__global__ void __launch_bounds__(kThreads) all_reduce_rms_norm_kernel(
    const __grid_constant__ CommArgs args,
    const T* __restrict__ x,  // [local_ranks, rows, H]
    T* residual,              // [local_ranks, rows, H]
    const T* __restrict__ weight,  // [H]
    T* out,                   // [local_ranks, rows, H]
    const int64_t* prefetch, int64_t ranges, int64_t rows, int64_t hidden, float eps, int work_blocks) {
    constexpr int kN = Wire<T>::kElements;
    const int local = blockIdx.y;
    const int64_t block = blockIdx.x;
    if (block >= work_blocks) {
        prefetch_ranges(prefetch, ranges, (block - work_blocks) * kThreads + threadIdx.x,
                        static_cast<int64_t>(gridDim.x - work_blocks) * kThreads);
        return;
    }
    unsigned char* smem = dynamic_shared();
    uint32_t* scratch = reinterpret_cast<uint32_t*>(smem);   // 2
    float* sums = reinterpret_cast<float*>(smem) + 4;        // 33
    uint4* row_vectors = reinterpret_cast<uint4*>(smem + 160);
    Exchange<kHooks> exchange(args, local, scratch);
    exchange.wipe_old_tags(block * kThreads + threadIdx.x, static_cast<int64_t>(work_blocks) * kThreads);
    const int64_t vectors = (hidden + kN - 1) / kN;
    const int64_t slice = args.two_shot ? (vectors + args.world - 1) / args.world : vectors;
    x += local * rows * hidden;
    residual += local * rows * hidden;
    out += local * rows * hidden;
    auto segment = [&](int64_t row) {
        return Segment<T, kHooks>{exchange, x + row * hidden, hidden, row * slice, threadIdx.x, kThreads};
    };

    if (!exchange.failed) {
        for (int64_t row = block; row < rows; row += work_blocks) segment(row).send_input();
    }
    // what the end of the first row needs, on its way while the peers' data travel
    uint4 early_residual[kEarly];
#pragma unroll
    for (int k = 0; k < kEarly; ++k) {
        const int64_t j = threadIdx.x + k * kThreads;
        early_residual[k] = make_uint4(0, 0, 0, 0);
        if (j < vectors) early_residual[k] = load_vector(residual + block * hidden, j, hidden);
    }
    exchange.finish(static_cast<uint32_t>(work_blocks));
    if (args.two_shot) {  // this rank's slices wait in `out` for their row
        for (int64_t row = block; row < rows; row += work_blocks) {
            segment(row).reduce([&](int64_t j, uint4 v) { store_vector(out + row * hidden, j, hidden, v); });
        }
    }
    for (int64_t row = block; row < rows; row += work_blocks) {
        Segment<T, kHooks> s = segment(row);
        auto keep = [&](int64_t j, uint4 v) { row_vectors[j] = v; };
        if (args.two_shot) {
            for (int64_t i = threadIdx.x; i < slice; i += kThreads) {
                const int64_t j = exchange.rank * slice + i;
                if (j < vectors) row_vectors[j] = load_vector(out + row * hidden, j, hidden);
            }
            s.gather(keep);
        } else {
            s.reduce(keep);
        }
        __syncthreads();
        float squares = 0.0f;
        auto add = [&](int64_t j, uint4 old) {
            float sum[kN], r[kN];
            Wire<T>::unpack(row_vectors[j], sum);
            Wire<T>::unpack(old, r);
#pragma unroll
            for (int k = 0; k < kN; ++k) r[k] += sum[k];
            const uint4 rounded = Wire<T>::pack(r);
            store_vector(residual + row * hidden, j, hidden, rounded);
            row_vectors[j] = rounded;
            Wire<T>::unpack(rounded, r);
#pragma unroll
            for (int k = 0; k < kN; ++k) squares += r[k] * r[k];
        };
#pragma unroll
        for (int k = 0; k < kEarly; ++k) {
            const int64_t j = threadIdx.x + k * kThreads;
            if (j < vectors) add(j, row == block ? early_residual[k] : load_vector(residual + row * hidden, j, hidden));
        }
        for (int64_t j = threadIdx.x + kEarly * kThreads; j < vectors; j += kThreads) {
            add(j, load_vector(residual + row * hidden, j, hidden));
        }
        uint4 early_weight[kEarly];
#pragma unroll
        for (int k = 0; k < kEarly; ++k) {
            const int64_t j = threadIdx.x + k * kThreads;
            early_weight[k] = j < vectors ? load_vector(weight, j, hidden) : make_uint4(0, 0, 0, 0);
        }
        squares = block_reduce(squares, [](float a, float b) { return a + b; }, sums);
        const float scale = 1.0f / __fsqrt_rn(squares / static_cast<float>(hidden) + eps);
        auto normalize = [&](int64_t j, uint4 weights) {
            float r[kN], w[kN];
            Wire<T>::unpack(row_vectors[j], r);
            Wire<T>::unpack(weights, w);
#pragma unroll
            for (int k = 0; k < kN; ++k) r[k] = r[k] * scale * w[k];
            store_vector(out + row * hidden, j, hidden, Wire<T>::pack(r));
        };
#pragma unroll
        for (int k = 0; k < kEarly; ++k) {
            const int64_t j = threadIdx.x + k * kThreads;
            if (j < vectors) normalize(j, early_weight[k]);
        }
        for (int64_t j = threadIdx.x + kEarly * kThreads; j < vectors; j += kThreads) {
            normalize(j, load_vector(weight, j, hidden));
        }
        __syncthreads();
    }
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& residual, const Tensor& weight,
         const Tensor& out, const OptTensor& prefetch, int64_t rows, int64_t hidden, float eps) {
    const CommArgs args = comm_kernel_args(c, rows * hidden * static_cast<int64_t>(sizeof(T)));
    const int work = static_cast<int>(rows < c.blocks ? rows : c.blocks);
    const int64_t ranges = prefetch ? prefetch->size(0) : 0;
    const dim3 grid(static_cast<unsigned>(work + (ranges > 0 ? kPrefetchBlocks : 0)), static_cast<unsigned>(c.local_ranks));
    const size_t smem = 160 + static_cast<size_t>((hidden * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16);
    auto kernel = comm_has_hooks(c) ? &all_reduce_rms_norm_kernel<T, true> : &all_reduce_rms_norm_kernel<T, false>;
    launch_comm(launch, c, kernel, grid, kThreads, smem, args, cptr<T>(x), mptr<T>(residual), cptr<T>(weight),
                mptr<T>(out), cptr<int64_t>(prefetch), ranges, rows, hidden, eps, work);
}

void all_reduce_rms_norm_cuda(const Tensor x, Tensor residual, const Tensor weight, Tensor out, const OptTensor prefetch,
                              int64_t comm, double eps) {
    const char* op = "all_reduce_rms_norm";
    const fv_comm& c = comm_of(op, comm);
    const NormShape shape = check_norm_arguments(op, c, x, residual, weight, out, prefetch);
    if (shape.rows == 0) return;
    const Launch launch(op, x);
    if (c.transport == kNccl) {
        nccl_all_reduce(op, c, x.const_data_ptr(), out.mutable_data_ptr(), x.numel(), x.scalar_type(), launch.stream);
        launch_add_rms_norm(launch, x.scalar_type(), weight.const_data_ptr(), residual.mutable_data_ptr(),
                            out.mutable_data_ptr(), shape.rows, shape.hidden, static_cast<float>(eps));
        return;
    }
    FV_CHECK(shape.hidden * 4 + 160 <= launch.props.max_smem, op, ": x must have rows of at most ",
             (launch.props.max_smem - 160) / 4, " elements; got ", shape.hidden, ". Fix: all_reduce, then the norm.");
    const float e = static_cast<float>(eps);
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
    else run<__nv_bfloat16>(launch, c, x, residual, weight, out, prefetch, shape.rows, shape.hidden, e);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("all_reduce_rms_norm", TORCH_BOX(&all_reduce_rms_norm_cuda)); }

}  // namespace fv
