// SPDX-License-Identifier: Apache-2.0
// tree_attention on the CPU: checks, blocks of at most 96 query rows, a queue of units shared by the threads.
// The arithmetic of a row is fixed by attend_block.h; how units are cut and who takes them changes no bit.
#include "attention/attend_block.h"
#include "attention/attention_args.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <memory>

namespace fv {
namespace {

constexpr const char* kOp = "tree_attention";
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
};

CacheView view(const Tensor& t) {
    const int64_t bytes = element_bytes(t.scalar_type());
    return {cptr<char>(t), t.stride(0) * bytes, t.stride(1) * bytes, t.stride(2) * bytes};
}

void write_rows(const Output& w, const Block& block, const Partial& p, int group, int head_dim, int ld, float v_scale) {
    const float inf = __builtin_inff();
    std::vector<float> y(head_dim);
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
        for (int j = 0; j < head_dim; ++j) y[j] = sum == 0.0f ? 0.0f : p.o[static_cast<int64_t>(r) * ld + j] * weight;
        store_row(y.data(), w.type, w.out + row * w.row + head * w.head, head_dim);
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

void attend(const AttentionArgs& args, const std::vector<Block>& blocks, const Output& w, const HeadScale& v_scale,
            int64_t work) {
    const int64_t count = static_cast<int64_t>(blocks.size());
    int64_t chunks = 0;
    for (const Block& block : blocks) chunks += block.end_chunk - block.first_chunk;
    const int rows = std::max(1, kBlockRows / args.group) * args.group;
    const int d = args.head_dim, ld = (d + kLanes - 1) / kLanes * kLanes;
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
                write_rows(w, block, total, args.group, d, ld, v_scale[block.head]);
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
        write_rows(w, blocks[i], total, args.group, d, ld, v_scale[blocks[i].head]);
    }
}

void tree_attention_cpu(const Tensor q, const Tensor k_cache, const Tensor v_cache, const std::optional<Tensor> mask,
                        const Tensor cu_nodes, const Tensor prefix_len, const Tensor page_table,
                        const std::optional<Tensor> /*schedule*/, const std::optional<Tensor> sinks,
                        const std::optional<Tensor> k_scale, const std::optional<Tensor> v_scale, Tensor out,
                        const std::optional<Tensor> lse, const std::optional<Tensor> /*workspace*/, int64_t row_base,
                        double scale, int64_t window, double softcap) {
    const auto [rows, heads, d, kv_heads, requests, ks, vs] =
        check_attention(kOp, q, k_cache, v_cache, mask, cu_nodes, prefix_len, page_table, sinks, k_scale, v_scale, out, lse,
                        row_base, scale, window, softcap);
    const PageTable pages(page_table, k_cache.size(1), k_cache.size(0));
    const int32_t *cu = cptr<int32_t>(cu_nodes), *prefix = cptr<int32_t>(prefix_len);
    check_cu_nodes(kOp, cu, requests, rows);
    check_prefix_len(kOp, prefix, requests);

    const int group = static_cast<int>(heads / kv_heads), block_nodes = std::max(1, kBlockRows / std::max(1, group));
    std::vector<Block> blocks;
    int64_t work = 0;
    for (int64_t b = 0; b < requests; ++b) {
        const int64_t n = cu[b + 1] - cu[b], p = prefix[b], columns = row_base + n;
        if (n == 0) continue;
        FV_CHECK(!mask || columns <= 64 * mask->size(1), kOp, ": mask must have a bit for each of the ", columns,
                 " forest columns of request ", b, "; got ", describe(*mask), ". Fix: pass [R, ceil(columns / 64)] words.");
        // the deepest look back is that of the shallowest row: its depth is >= 0 in a chain, >= -1 under a mask
        const int64_t first_chain = p + row_base + 1 - window;
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, mask ? p - window : first_chain);
        pages.check(kOp, b, std::min(first, p), p + columns);
        for (int64_t h = 0; h < kv_heads; ++h) {
            for (int64_t i = 0; i < n; i += block_nodes) {
                const int nodes = static_cast<int>(std::min<int64_t>(block_nodes, n - i));
                const int64_t end = p + (mask ? columns : row_base + i + nodes);
                const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, (mask ? p : p + row_base + i + 1) - window);
                blocks.push_back({b, cu[b] + i, static_cast<int>(h), nodes, static_cast<int>(row_base + i), p, columns,
                                  static_cast<float>(scale) * ks[h], begin / kChunkKeys, (end - 1) / kChunkKeys + 1});
                work += 2 * (end - begin) * nodes * group * d;
            }
        }
    }
    const int64_t bytes = element_bytes(q.scalar_type());
    const Output w{mptr<char>(out), out.stride(0) * bytes, out.stride(1) * bytes, q.scalar_type(), mptr<float>(lse),
                   lse ? lse->stride(0) : 0, cptr<float>(sinks)};
    const AttentionArgs args{cptr<char>(q), q.stride(0) * bytes, q.stride(1) * bytes, q.scalar_type(),
                             k_cache.scalar_type(), view(k_cache), view(v_cache), pages, cptr<int64_t>(mask),
                             mask ? mask->stride(0) : 0, mask ? mask->size(1) : 0, static_cast<int>(d), group,
                             static_cast<int>(window), static_cast<float>(softcap)};
    if (!blocks.empty()) attend(args, blocks, w, vs, work);
    const std::vector<float> zero(d, 0.0f);
    for (int64_t r = requests ? cu[requests] : 0; r < rows; ++r) {
        for (int64_t h = 0; h < heads; ++h) {
            store_row(zero.data(), w.type, w.out + r * w.row + h * w.head, static_cast<int>(d));
            if (w.lse) w.lse[r * w.lse_row + h] = -__builtin_inff();
        }
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CPU, m) { m.impl("tree_attention", TORCH_BOX(&tree_attention_cpu)); }

}  // namespace fv
