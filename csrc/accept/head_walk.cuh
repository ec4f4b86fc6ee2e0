// SPDX-License-Identifier: Apache-2.0
// The walk of lm_head_verify_tree: over the keys that the product has left, or, for a request with filters or logprobs,
// over its rows of logits in the workspace, as verify_tree does.
#pragma once
#include "accept/head_score.cuh"

namespace fv {

// Grid (cluster, B). The keys of the request's rows are zero again afterwards.
template <bool kExtras>
__global__ void __launch_bounds__(kTeamThreads) head_walk_kernel(const __grid_constant__ HeadArgs a) {
    const VerifyTask& task = a.task;
    Team team{reinterpret_cast<TeamScratch*>(dynamic_shared()), task.shape.cluster};
    const int64_t b = blockIdx.y;
    if (team.tid() == 0) team.s->list_count[0] = team.s->list_count[1] = 0;
    if (!task.in.active[b]) {
        if (team.rank() == 0) write_inactive(team, task.out, b);
        return;
    }
    if (team.tid() == 0) init_rows<kExtras, float>(task, b, team);
    const bool in_order = ranges_in_order(a);  // has a barrier
    const bool from_logits = wants_logits(a, in_order, team.s->params);
    if (!from_logits && team.rank() > 0) return;
    if (!from_logits) {
        const NodeRange r = node_range(task.in.cu_nodes, b, task.in.rows);
        for (int i = team.tid(); i < r.n; i += kTeamThreads) {
            team.s->node_keys[i] = a.keys[r.begin + i] | (a.bad[r.begin + i] ? kKeyBad : 0);
            a.keys[r.begin + i] = 0;
            a.bad[r.begin + i] = 0;
        }
    }
    const WalkTree tree = open_tree(team, task.in, task.tokens, b);  // has a barrier
    copy_row(team);
    walk_tree(team, tree, team.s->params.flags, task.out, task.stops, b, [&](int32_t node, int32_t depth, const int64_t*) {
        if (!from_logits) return chosen_of(team.s->node_keys[node]);
        if constexpr (kExtras) __syncthreads();  // the leader has written the token above
        const Row<float>& row = open_row<kExtras, float>(task, tree.begin + node, depth, depth & 1, team);
        Chosen c = chosen_of(team_choice<kExtras>(row, team));
        if (c.has_token && task.out.logprobs) c.logprob = raw_logprob(row, team, static_cast<int>(c.token));
        return c;
    });
    if (from_logits) team.barrier();  // no block leaves while another may read its shared memory
}

}  // namespace fv
