// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: blocks of at most 96 query rows, a queue of units shared by the threads, rows written out.
// The arithmetic of a row is fixed by attend_block.h; how units are cut and who takes them changes no bit.
#pragma once
#include "attention/attend_block.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <memory>

namespace fv {

constexpr int kBlockRows = 96;                        // query rows that share one pass over the KV
constexpr int64_t kWorkPerThread = int64_t{1} << 19;  // multiply-adds below which another thread does not pay
constexpr int64_t kSplitFloats = int64_t{1} << 25;    // partial results of a split: at most 128 MiB

struct Output {
    char* out;
    int64_t row, head;  // strides in bytes
    ScalarType type;
    float* lse;
    int64_t lse_row;
    const float* sinks;
    int dim;  // of an output row: the first dims of V
};

inline CacheView view(const Tensor& t) {
    const int64_t bytes = element_bytes(t.scalar_type());
    return {cptr<char>(t), t.stride(0) * bytes, t.stride(1) * bytes, t.stride(2) * bytes};
}

inline void write_rows(const Output& w, const Block& block, const Partial& p, int group, int ld, float v_scale) {
    const float inf = __builtin_inff();
    std::vector<float> y(w.dim);
    for (int r = 0; r < block.nodes * group; ++r) {
        const int64_t row = block.row0 + r / group;
        const int head = block.head * group + r % group;
        const float top = p.maximum[r], sum = p.sum[r];
        float weight = 0.0f;  // a row that sees nothing: out 0, lse -inf
        if (sum != 0.0f) {
            float total = sum;
            weight = v_scale;
            if (w.sinks) {
                const float sink = w.sinks[head], shift = sink > top ? sink : top;
                total = sum * std::exp(top - shift) + std::exp(sink - shift);
                weight *= std::exp(top - shift);
            }
            weight /= total;
        }
        for (int j = 0; j < w.dim; ++j) y[j] = sum == 0.0f ? 0.0f : p.o[static_cast<int64_t>(r) * ld + j] * weight;
        store_row(y.data(), w.type, w.out + row * w.row + head * w.head, w.dim);
        if (w.lse) w.lse[row * w.lse_row + head] = sum == 0.0f ? -inf : top + std::log(sum);
    }
}

// Threads take units from one counter: balanced for triangular work, and units are independent.
template <class F>
void for_each_unit(int64_t units, int64_t work, const F& f) {
    const int64_t useful = std::min(units, 1 + work / kWorkPerThread);
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(useful, torch::stable::get_num_threads()));
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) f(next);
    });
}

inline void attend(const AttentionArgs& args, const std::vector<Block>& blocks, const Output& w, const HeadScale& v_scale,
            int64_t work) {
    const int64_t count = static_cast<int64_t>(blocks.size());
    int64_t chunks = 0;
    for (const Block& block : blocks) chunks += block.end_chunk - block.first_chunk;
    const int rows = std::max(1, kBlockRows / args.group) * args.group;
    const int ld = (args.head_dim + kLanes - 1) / kLanes * kLanes;
    const int64_t size = Partial::floats(rows, ld);
    const int64_t threads = torch::stable::get_num_threads();
    if (count >= 2 * threads || chunks == count || threads == 1 || chunks * size > kSplitFloats) {
        for_each_unit(count, work, [&](std::atomic<int64_t>& next) {
            BlockAttention attention(args);
            std::vector<float> scratch(2 * size);
            for (int64_t u; (u = next.fetch_add(1)) < count;) {
                const Block& block = blocks[u];
                const int m = block.nodes * args.group;
                Partial total(scratch.data(), m, ld), spare(scratch.data() + size, m, ld);
                attention.run(block, block.first_chunk, block.end_chunk, total, spare);
                write_rows(w, block, total, args.group, ld, v_scale[block.head]);
            }
        });
        return;
    }
    // Few blocks, long context: every chunk is a unit; then the chunks of a block are folded in order.
    std::vector<int64_t> begin(count + 1, 0);
    for (int64_t i = 0; i < count; ++i) begin[i + 1] = begin[i] + blocks[i].end_chunk - blocks[i].first_chunk;
    const std::unique_ptr<float[]> partials(new float[chunks * size]);
    for_each_unit(chunks, work, [&](std::atomic<int64_t>& next) {
        BlockAttention attention(args);
        for (int64_t u; (u = next.fetch_add(1)) < chunks;) {
            const int64_t i = std::upper_bound(begin.begin(), begin.end(), u) - begin.begin() - 1;
            const int64_t chunk = blocks[i].first_chunk + u - begin[i];
            const Partial p(partials.get() + u * size, blocks[i].nodes * args.group, ld);
            attention.run(blocks[i], chunk, chunk + 1, p, p);
        }
    });
    for (int64_t i = 0; i < count; ++i) {
        const int m = blocks[i].nodes * args.group;
        Partial total(partials.get() + begin[i] * size, m, ld);
        for (int64_t u = begin[i] + 1; u < begin[i + 1]; ++u) {
            const Partial next(partials.get() + u * size, m, ld);
            fold(&total, &next, m, ld);
        }
        write_rows(w, blocks[i], total, args.group, ld, v_scale[blocks[i].head]);
    }
}

// Rows from `first` on belong to no request: out 0, lse -inf.
inline void clear_rows(const Output& w, int64_t first, int64_t rows, int64_t heads) {
    const std::vector<float> zero(w.dim, 0.0f);
    for (int64_t r = first; r < rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
            store_row(zero.data(), w.type, w.out + r * w.row + h * w.head, w.dim);
            if (w.lse) w.lse[r * w.lse_row + h] = -__builtin_inff();
        }
    }
}

}  // namespace fv
