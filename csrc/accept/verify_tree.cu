// SPDX-License-Identifier: Apache-2.0
// verify_tree on the GPU: one launch from logits to emitted tokens. A team of blocks per request follows the accepted path
// and reads visited rows only, each block its lines of the vocabulary; where rows are few all of them are taken at once, and
// one block walks (algo/verify_plan.h chooses; device_rows.cuh and device_filters.cuh say what happens to a row).
// Cost: (accepted + 1) * V logits per request, or rows * V. One exchange of the team per visited row, also with top-k.
#include <torch/csrc/stable/library.h>

#include "accept/verify_args.h"
#include "accept/verify_task.cuh"
#include "common/launch.h"

namespace fv {
namespace {

constexpr int kMostSlices = 256;  // of a row

// Where a team takes all of n nodes' rows, a warp takes a slice of one. What the warps of a block find of the same node is put
// together: a segment, of which a block has at most 16.
struct WarpItems {
    int slices, at0, node0;  // of a row; of the block's first warp
    float part;              // 1 / slices
    __device__ __forceinline__ WarpItems(Team team, int n) {
        const int most = of(team.size * kTeamWarps, 1.0f / static_cast<float>(n));
        slices = most < kMostSlices ? most : kMostSlices;
        part = 1.0f / static_cast<float>(slices);
        at0 = team.index * kTeamWarps;
        node0 = node_of(at0);
    }
    // x / n for small numbers, part = 1 / n: x + 1/2 is far enough from a multiple of n.
    __device__ static __forceinline__ int of(int x, float part) { return static_cast<int>((static_cast<float>(x) + 0.5f) * part); }
    __device__ __forceinline__ int node_of(int item) const { return of(item, part); }
    __device__ __forceinline__ int node(int warp) const { return node_of(at0 + warp); }
    __device__ __forceinline__ int slice(int warp) const { return at0 + warp - node(warp) * slices; }
};

// Best key of the warp's slice (greedy: `own`) of a row whose other warps in the block are those of `same`; every thread of the
// block calls it.
// True in the segment's first warp: *key is the segment's.
template <class T>
__device__ __forceinline__ bool segment_best(
    const Row<T>& row, Team team, Bound bound, bool greedy, Word own, bool active, unsigned same, Word* key) {
    TeamScratch* s = team.s;
    const int lane = team.lane() % kTeamWarps;
    const bool mine = same >> lane & 1, first = active && team.warp() == __ffs(static_cast<int>(same)) - 1;
    const auto share = [&](BlockSlot slot, Word v) {
        if (team.lane() == 0) s->block_words[slot][team.warp()] = v;
    };
    const auto best_of = [&](BlockSlot slot) {
        return warp_max_key(mine ? s->block_words[slot][lane] : 0);
    };
    if (greedy) {
        share(kSlotSettle, own);
        __syncthreads();
        *key = best_of(kSlotSettle);
        return first;
    }
    share(kSlotFast, warp_max_u32(ordered_bits(bound.best + 0.0f)));
    __syncthreads();
    const uint32_t top = warp_max_u32(mine ? static_cast<uint32_t>(s->block_words[kSlotFast][lane]) : 0);
    const bool fast = active && usable(top);
    const float threshold = fast ? first_threshold(false, from_ordered_bits(top)) : 0.0f;
    if (fast) own = settle_warp<false>(row, 0, bound, threshold, -kInf, 0.0f);
    else if (active) own = warp_best_exact(row, team.lane());
    share(kSlotSettle, own);
    __syncthreads();
    *key = best_of(kSlotSettle);
    const float low = score_reached(false, *key);
    const bool again = fast && low < threshold;
    if (__syncthreads_or(again)) {
        share(kSlotSettleAgain, again ? settle_warp<false>(row, 0, bound, low, -kInf, 0.0f) : own);
        __syncthreads();
        *key = best_of(kSlotSettleAgain);
    }
    return first;
}

// Every row of the request at once: keys of segments to the workspace, collected by the team's first block. `ahead`: this
// thread's first chunks. True in the first block: node_keys are known.
template <class T>
__device__ __forceinline__ bool take_all_rows(
    const VerifyTask& a, const WalkTree& tree, Team team, const WarpItems& items, ChunksAhead<T>& ahead) {
    TeamScratch* s = team.s;
    const int node = items.node(team.warp()), slices = items.slices;
    const uint32_t tag = s->first_tag;
    const bool active = node < tree.n;
    Row<T>& row = *reinterpret_cast<Row<T>*>(s->warp_rows[team.warp()]);
    copy_words(&row, s->rows[0], team.lane(), 32);
    __syncwarp();
    Bound bound{-kInf, -kInf, 0};
    Word own = 0;
    const bool greedy = s->params.greedy();  // of the request, so of the whole block
    if (active) {
        const int depth = node_depth<false>(team, node);
        if (team.lane() == 0) {
            row.set_slice(items.slice(team.warp()), slices, 32, kWarpLineShift);
            open_row<false>(a, row, tree.begin + node, depth, 0, team);
        }
        __syncwarp();
        const int c = row.start(team.lane());
        if (greedy) {
            bool bad;
            own = greedy_key(row, c, ahead, &bad);
            if (bad) own = warp_best_exact(row, team.lane());
        } else {
            bound = scan_chunks(row, c, ahead);
        }
    }
    const unsigned same = __ballot_sync(kFullWarp, team.lane() < kTeamWarps && items.node(team.lane()) == node);
    Word key;
    if (segment_best(row, team, bound, greedy, own, active, same, &key) && team.lane() == 0) {
        put_tagged(team.item_place(items.at0 + node - items.node0), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key), tag);
    }
    if (team.index > 0) return false;
    clear_hits(team, tree.n);
    // `group` threads for each node, one for each of its segments
    int group = 1;
    while (group < (slices + 2 * kTeamWarps - 2) / kTeamWarps) group *= 2;
    for (int i0 = 0; i0 < tree.n * group; i0 += kTeamThreads) {
        const int n = (i0 + team.tid()) / group, part = (i0 + team.tid()) % group;
        const int block = n * slices / kTeamWarps + part;
        Word best = 0;
        uint32_t status = 0;
        if (n < tree.n && block * kTeamWarps < (n + 1) * slices) {
            const uint2 w = get_tagged(team.item_place(block * kTeamWarps + n - items.node_of(block * kTeamWarps)), tag);
            status = w.y & static_cast<uint32_t>(kKeyStatus);
            best = static_cast<Word>(w.x) << 32 | (w.y & ~static_cast<uint32_t>(kKeyStatus));
        }
        for (int d = 1; d < group; d <<= 1) {
            const Word other = __shfl_xor_sync(kFullWarp, best, d);
            best = other > best ? other : best;
            status |= __shfl_xor_sync(kFullWarp, status, d);
        }
        if (n < tree.n && part == 0) s->node_keys[n] = best | status;
    }
    __syncthreads();
    return true;
}

// The same for rows that need whole blocks (filters, log-probabilities, extras): the team is cut into one for each node.
template <bool kExtras, class T>
__device__ bool take_rows_by_teams(const VerifyTask& a, const WalkTree& tree, Team team) {
    TeamScratch* s = team.s;
    const int most = team.size / tree.n, size = most < kTeamWide ? most : kTeamWide, node = team.index / size;
    const Team own{{}, size, team.index % size, team.area, team.block0 + node * size};
    const uint32_t tag = s->first_tag;
    if (node < tree.n) {
        Row<T>& row = *reinterpret_cast<Row<T>*>(s->rows[0]);
        const int depth = node_depth<kExtras>(team, node);
        if (team.leader()) {
            row.set_slice(own.index, size, kTeamThreads);
            open_row<kExtras>(a, row, tree.begin + node, depth, 0, team);
            s->tag[0] = tag;
        }
        __syncthreads();
        if constexpr (kExtras) mark_ancestors(row, team);
        const TeamChoice c = team_choice<kExtras>(a, row, own);
        if (own.index == 0 && team.leader()) {
            put_tagged(team.item_place(2 * node), static_cast<uint32_t>(c.key >> 32), static_cast<uint32_t>(c.key), tag);
            put_tagged(team.item_place(2 * node + 1), float_to_bits(c.logprob), 0, tag);
        }
        __syncthreads();
        clear_sums(own);
    }
    if (team.index > 0) return false;
    clear_hits(team, tree.n);
    for (int n = team.tid(); n < tree.n; n += kTeamThreads) {
        const uint2 key = get_tagged(team.item_place(2 * n), tag), logprob = get_tagged(team.item_place(2 * n + 1), tag);
        s->node_keys[n] = static_cast<Word>(key.x) << 32 | key.y;
        s->node_logprobs[n] = bits_to_float(logprob.x);
    }
    __syncthreads();
    return true;
}

// init_rows() where the values were not asked for ahead.
template <class T>
__device__ __attribute__((noinline)) void init_rows_now(const VerifyTask& a, int64_t b, Team team) {
    RequestValues values;
    values.ask(a, b);
    init_rows<true, T>(a, b, team, values);
}
template <class T, bool kExtras>
__global__ void __launch_bounds__(kTeamThreads, kBlocksPerSm) verify_tree_kernel(const __grid_constant__ VerifyTask a) {
    int64_t b;
    const Team joined = join_team(a, &b);
    RequestValues values;
    if (!kExtras && joined.tid() == kTagThread) values.ask(a, b);
    if (joined.tid() == kTeamThreads - 64) touch_outputs(a, joined.s);
    AheadTeam team(joined, a.in, a.tokens, a.shape.all_rows ? a.rows_each * b : -1);
    TeamScratch* s = team.s;
    const int32_t active = a.in.active[b];
    const NodeRange range = node_range(a.in.cu_nodes, b, a.in.rows);
    ChunksAhead<T> ahead;
    const bool all = a.shape.all_rows && team.size > 1;
    const bool aligned = a.stride * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
    const bool by_warps = !kExtras && all && aligned && active && range.n > 0 && range.n <= team.size * kTeamWarps;
    const WarpItems items(team, by_warps ? range.n : 1);
    if (by_warps) {
        const int node = items.node(team.warp()), slice = items.slice(team.warp());
        if (node < range.n) {
            ahead.ask(static_cast<const T*>(a.logits) + (range.begin + node) * a.stride, slice * 32 + team.lane(), 32 * items.slices,
                      static_cast<int>(a.in.vocab) / kChunk);
        }
    } else if (active && range.n > 0) {
        prefetch_slice<T>(a, range.begin, team);
    }
    if (!active) {
        if (team.index == 0) write_inactive(team, a.out, b);
        if (team.index == 0 && team.tid() == kTagThread) count_team(a);
        return;
    }
    if (team.tid() == kTagThread) {
        if constexpr (kExtras) init_rows_now<T>(a, b, team);
        else init_rows<false, T>(a, b, team, values);
    }
    const WalkTree tree = open_tree(team, a.in, a.tokens, b);  // has a barrier
    const bool wide = s->params.filtered() || a.out.logprobs;
    if constexpr (!kExtras) {
        if (by_warps && !wide && tree.n == range.n && reinterpret_cast<const Row<T>*>(s->rows[0])->plain) {
            if (take_all_rows<T>(a, tree, team, items, ahead)) walk_keys(a, tree, team, b);
            return;
        }
    }
    if (all && tree.n > 1 && tree.n <= team.size) {
        if (take_rows_by_teams<kExtras, T>(a, tree, team)) walk_keys(a, tree, team, b);
        return;
    }
    if (wide && team.size > kTeamWide) {
        team.size = kTeamWide;
        if (team.index >= kTeamWide) return;
    }
    walk_rows<kExtras, T>(a, tree, team, b);
}

template <class T>
void launch_verify_tree(const Launch& launch, const VerifyTask& task, bool extras) {
    const dim3 grid(static_cast<unsigned>(task.in.batch * task.shape.blocks));
    const auto kernel = extras ? verify_tree_kernel<T, true> : verify_tree_kernel<T, false>;
    if (task.shape.blocks > 1) launch.run_resident(kernel, grid, dim3(kTeamThreads), kTeamSmem, task);
    else launch.run(kernel, grid, dim3(kTeamThreads), kTeamSmem, task);
}

void verify_tree_cuda(
    const Tensor logits, const Tensor tokens, const Tensor parents, const Tensor cu_nodes, const Tensor prefix_len,
    const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature, const Tensor top_k,
    const Tensor top_p, const Tensor min_p, const Tensor seed, const OptTensor bias, const OptTensor bitmask,
    const OptTensor penalties, OptTensor counts, Tensor out_tokens, Tensor num_tokens_out, Tensor path,
    Tensor next_root, Tensor flags, OptTensor logprobs, OptTensor workspace, int64_t vocab_size, int64_t rule) {
    VerifyTask a;
    const VerifyCall call = check_verify_tree(
        logits, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids, temperature, top_k, top_p, min_p, seed,
        bias, bitmask, penalties, counts, out_tokens, num_tokens_out, path, next_root, flags, logprobs, workspace,
        vocab_size, rule);
    if (call.in.batch == 0) return;
    const Launch launch("verify_tree", logits);
    a.logits = logits.const_data_ptr();
    a.stride = logits.stride(0);
    a.in = call.in;
    a.out = call.out;
    a.tokens = IdArray(tokens);
    a.stops = call.stops;
    a.bias = cptr<float>(bias);
    a.bitmask = cptr<int32_t>(bitmask);
    a.shape = verify_shape(call.in.batch, call.in.rows, vocab_size, launch.props.sms, workspace.has_value());
    a.area = mptr<unsigned char>(workspace);
    a.rows_each = call.in.rows / call.in.batch;
    const bool extras = bias || bitmask || penalties;
    switch (logits.scalar_type()) {
        case ScalarType::Half: return launch_verify_tree<__half>(launch, a, extras);
        case ScalarType::BFloat16: return launch_verify_tree<__nv_bfloat16>(launch, a, extras);
        default: return launch_verify_tree<float>(launch, a, extras);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("verify_tree", TORCH_BOX(&verify_tree_cuda)); }

}  // namespace fv
