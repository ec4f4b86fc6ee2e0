// SPDX-License-Identifier: Apache-2.0
// verify_tree on the GPU: one launch from logits to emitted tokens. A team of blocks per request follows the accepted path
// and reads visited rows only, each block its slice of the vocabulary; few rows in all are taken at once by several teams, and
// the last team walks (algo/verify_plan.h chooses; device_rows.cuh and device_filters.cuh say what happens to a row).
// Cost: (accepted + 1) * V logits per request, or rows * V. One barrier of the team per visited row; three with top-k.
#include <torch/csrc/stable/library.h>

#include "accept/verify_args.h"
#include "accept/verify_task.cuh"
#include "common/launch.h"

namespace fv {
namespace {

// Every row of the request by its teams, results to the workspace. True for the team that finishes last.
template <bool kExtras, class T>
__device__ bool take_all_rows(const VerifyTask& a, int64_t b, const WalkTree& tree, int index, Team team) {
    const bool whole = team.s->params.filtered() || a.out.logprobs;  // the team shares such rows; others leave one key per block
    const int lanes = a.shape.lanes(), rank = team.rank();
    int turn = 0;
    for (int item = index; item < tree.n * a.shape.slices; item += a.shape.teams, turn ^= 1) {
        int node = item, lane = rank;
        if (a.shape.slices > 1) {  // single blocks share a row
            node = item / a.shape.slices;
            lane = item % a.shape.slices;
            if (team.leader()) reinterpret_cast<Row<T>*>(team.s->rows[turn])->set_slice(lane, lanes);
        }
        if (a.shape.slices == 1 && item + a.shape.teams < tree.n) {
            prefetch_slice<T>(a, tree.begin + item + a.shape.teams, rank, lanes);
        }
        if constexpr (kExtras) __syncthreads();  // the row before has read the ancestors
        const int depth = node_depth<kExtras>(team, node);
        const int64_t at = tree.begin + node;
        const Row<T>& row = open_row<kExtras, T>(a, at, depth, turn, team);
        Word key;
        if (whole) {
            key = team_choice<kExtras>(row, team);
            if (a.out.logprobs && key_has_token(key)) {
                const float logprob = raw_logprob(row, team, static_cast<int>(key_id(key)));
                if (rank == 0 && team.leader()) a.row_logprobs[at] = logprob;
            }
            if (rank > 0) key = 0;
        } else {
            key = best_of_slice<kExtras>(row, team, -kInf, 0.0f);
        }
        if (team.leader()) a.row_keys[at * lanes + lane] = key;
    }
    if (team.leader()) __threadfence();
    team.barrier();
    if (rank == 0 && team.leader()) {
        const bool last = atomic_add_acq_rel(a.arrivals + b, 1) == static_cast<uint32_t>(a.shape.teams) - 1;
        if (last) a.arrivals[b] = 0;
        team.s->last_team = last;
    }
    team.barrier();
    const bool last = *cluster_map(&team.s->last_team, 0) != 0;
    if (!last) {
        team.barrier();  // rank 0's memory was read
        return false;
    }
    // one key per node: the best of its lanes, status bits of all
    const int half = team.tid() / kMaxLanes, k = team.tid() % kMaxLanes;
    for (int node0 = 0; node0 < tree.n; node0 += kTeamThreads / kMaxLanes) {
        const int node = node0 + half;
        Word key = node < tree.n && k < lanes ? __ldcg(a.row_keys + (tree.begin + node) * lanes + k) : 0;
#pragma unroll
        for (int d = kMaxLanes / 2; d > 0; d >>= 1) {
            const Word other = __shfl_xor_sync(kFullWarp, key, d);
            const Word status = (key | other) & kKeyStatus, mine = key & ~kKeyStatus, theirs = other & ~kKeyStatus;
            key = (mine > theirs ? mine : theirs) | status;
        }
        if (k == 0 && node < tree.n) team.s->node_keys[node] = key;
    }
    __syncthreads();
    return true;
}

// Grid (B * teams * cluster).
template <class T, bool kExtras>
__global__ void __launch_bounds__(kTeamThreads, kBlocksPerSm) verify_tree_kernel(const __grid_constant__ VerifyTask a) {
    Team team{reinterpret_cast<TeamScratch*>(dynamic_shared()), a.shape.cluster};
    const int64_t b = blockIdx.x / (a.shape.cluster * a.shape.teams);
    const int index = static_cast<int>(blockIdx.x) / a.shape.cluster % a.shape.teams;
    const bool active = a.in.active[b] != 0;
    const NodeRange range = node_range(a.in.cu_nodes, b, a.in.rows);
    if (team.tid() == 0) team.s->list_count[0] = team.s->list_count[1] = 0;
    if (!active) {
        if (index == 0 && team.rank() == 0) write_inactive(team, a.out, b);
        return;
    }
    if (a.shape.slices == 1 && index < range.n) prefetch_slice<T>(a, range.begin + index, team.rank(), team.size);
    if (team.tid() == kTeamThreads - 1) init_rows<kExtras, T>(a, b, team);
    const WalkTree tree = open_tree(team, a.in, a.tokens, b);  // has a barrier
    copy_row(team);
    bool known = false;
    if (a.shape.teams > 1) {
        // keys lie by row, so requests that overlap (cu_nodes out of order) do without; so do rows that need a whole team
        // where the lanes are single blocks
        const bool ordered = team.all(0, static_cast<int32_t>(a.in.batch), [&](int32_t i) {
            return a.in.cu_nodes[i] >= 0 && a.in.cu_nodes[i] <= a.in.cu_nodes[i + 1] && a.in.cu_nodes[i + 1] <= a.in.rows;
        });
        known = ordered && (a.shape.slices == 1 || !(team.s->params.filtered() || a.out.logprobs));
        if (known) {
            if (!take_all_rows<kExtras, T>(a, b, tree, index, team)) return;
        } else if (index > 0) {
            return;
        }
    }
    walk_tree(team, tree, team.s->params.flags, a.out, a.stops, b, [&](int32_t node, int32_t depth, const int64_t*) {
        const int64_t at = tree.begin + node;
        if (known) {
            Chosen c = chosen_of(team.s->node_keys[node]);
            if (c.has_token && a.out.logprobs) c.logprob = __ldcg(a.row_logprobs + at);
            return c;
        }
        const int32_t child = team.first(node + 1, tree.n, [&](int32_t j) { return team.parent(j) == node; });
        if (child >= 0) prefetch_slice<T>(a, tree.begin + child, team.rank(), team.size);  // the likeliest comes first
        if constexpr (kExtras) __syncthreads();  // the leader has written the token above
        const Row<T>& row = open_row<kExtras, T>(a, at, depth, depth & 1, team);
        Chosen c = chosen_of(team_choice<kExtras>(row, team));
        if (c.has_token && a.out.logprobs) c.logprob = raw_logprob(row, team, static_cast<int>(c.token));
        return c;
    });
    team.barrier();  // no block leaves while another may read its shared memory
}

template <class T>
void launch_verify_tree(const Launch& launch, const VerifyTask& task, bool extras) {
    const dim3 grid(static_cast<unsigned>(task.in.batch * task.shape.teams * task.shape.cluster));
    launch.run_cluster(extras ? verify_tree_kernel<T, true> : verify_tree_kernel<T, false>, task.shape.cluster, grid,
                       dim3(kTeamThreads), kTeamSmem, task);
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
    a.shape = verify_shape(call.in.batch, call.in.rows, vocab_size, launch.props.major, launch.props.sms, workspace.has_value());
    unsigned char* memory = mptr<unsigned char>(workspace);
    a.arrivals = reinterpret_cast<uint32_t*>(memory);
    a.row_keys = memory ? reinterpret_cast<Word*>(memory + arrivals_bytes(call.in.batch)) : nullptr;
    a.row_logprobs = memory ? reinterpret_cast<float*>(a.row_keys + call.in.rows * kMaxLanes) : nullptr;
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
