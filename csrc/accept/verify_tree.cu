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

// Which slice of which of n nodes' rows a warp takes, where a team takes all of them.
struct WarpItem {
    int slices, at, node, slice;
    __device__ __forceinline__ WarpItem(Team team, int n) {
        const int most = team.size * kTeamWarps / n;
        slices = most < kMostSlices ? most : kMostSlices;
        at = team.index * kTeamWarps + team.warp();
        node = at / slices;
        slice = at % slices;
    }
};

// Every row of the request at once, a warp per slice of a row: keys to the workspace, collected by the team's first block.
// True in that block: node_keys are known.
template <class T>
__device__ bool take_all_rows(const VerifyTask& a, const WalkTree& tree, Team team) {
    TeamScratch* s = team.s;
    const WarpItem item(team, tree.n);
    const uint32_t tag = s->first_tag;
    if (item.node < tree.n) {
        Row<T>& row = *reinterpret_cast<Row<T>*>(s->warp_rows[team.warp()]);
        copy_words(&row, s->rows[0], team.lane(), 32);
        __syncwarp();
        const int depth = node_depth<false>(team, item.node);
        if (team.lane() == 0) {
            row.set_slice(item.slice, item.slices, 32);
            open_row<false>(a, row, tree.begin + item.node, depth, 0, team);
        }
        __syncwarp();
        const Word key = warp_best(row);
        if (team.lane() == 0) put_tagged(team.item_place(item.at), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key), tag);
    }
    if (team.index > 0) return false;
    for (int n = team.warp(); n < tree.n; n += kTeamWarps) {
        Word best = 0;
        uint32_t status = 0;
        for (int i = team.lane(); i < item.slices; i += 32) {
            const uint2 w = get_tagged(team.item_place(n * item.slices + i), tag);
            const Word key = static_cast<Word>(w.x) << 32 | (w.y & ~static_cast<uint32_t>(kKeyStatus));
            status |= w.y & static_cast<uint32_t>(kKeyStatus);
            best = key > best ? key : best;
        }
        best = warp_max_word(best) | __reduce_or_sync(kFullWarp, status);
        if (team.lane() == 0) s->node_keys[n] = best;
    }
    __syncthreads();
    return true;
}

// The same for rows that need whole blocks (filters, log-probabilities, extras): the team is cut into one for each node.
template <bool kExtras, class T>
__device__ bool take_rows_by_teams(const VerifyTask& a, const WalkTree& tree, Team team) {
    TeamScratch* s = team.s;
    const int most = team.size / tree.n, size = most < kTeamWide ? most : kTeamWide, node = team.index / size;
    const Team own{s, size, team.index % size, team.area, team.block0 + node * size};
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
    for (int n = team.tid(); n < tree.n; n += kTeamThreads) {
        const uint2 key = get_tagged(team.item_place(2 * n), tag), logprob = get_tagged(team.item_place(2 * n + 1), tag);
        s->node_keys[n] = static_cast<Word>(key.x) << 32 | key.y;
        s->node_logprobs[n] = bits_to_float(logprob.x);
    }
    __syncthreads();
    return true;
}

// Grid (B * blocks).
template <class T, bool kExtras>
__global__ void __launch_bounds__(kTeamThreads, kBlocksPerSm) verify_tree_kernel(const __grid_constant__ VerifyTask a) {
    int64_t b;
    Team team = join_team(a, reinterpret_cast<TeamScratch*>(dynamic_shared()), &b);
    TeamScratch* s = team.s;
    if (a.in.active[b] == 0) {
        if (team.index == 0) write_inactive(team, a.out, b);
        return;
    }
    const NodeRange range = node_range(a.in.cu_nodes, b, a.in.rows);
    if (a.shape.all_rows && range.n > 0 && range.n <= team.size * kTeamWarps) {
        const WarpItem item(team, range.n);
        if (item.node < range.n) prefetch_lines<T>(a, range.begin + item.node, item.slice, item.slices, team.lane(), 32);
    } else if (range.n > 0) {
        prefetch_slice<T>(a, range.begin, team);
    }
    if (team.tid() == kTeamThreads - 1) init_rows<kExtras, T>(a, b, team);
    const WalkTree tree = open_tree(team, a.in, a.tokens, b);  // has a barrier
    const bool wide = s->params.filtered() || a.out.logprobs, all = a.shape.all_rows && team.size > 1 && tree.n > 0;
    if constexpr (!kExtras) {
        const Row<T>& row = *reinterpret_cast<const Row<T>*>(s->rows[0]);
        const bool aligned = a.stride * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
        if (all && !wide && row.plain && aligned && tree.n <= team.size * kTeamWarps) {
            if (take_all_rows<T>(a, tree, team) && team.warp() == 0) walk_keys(a, tree, team, b);
            return;
        }
    }
    if (all && tree.n > 1 && tree.n <= team.size) {
        if (take_rows_by_teams<kExtras, T>(a, tree, team) && team.warp() == 0) walk_keys(a, tree, team, b);
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
