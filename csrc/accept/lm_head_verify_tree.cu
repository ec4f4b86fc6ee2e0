// SPDX-License-Identifier: Apache-2.0
// lm_head_verify_tree on CUDA: the LM-head product with the acceptance inside.
//
// The product (head_product.cuh) reads the weight once and leaves one 64-bit key per node row: the best of
// score = logit / T + noise, or of the logit at temperature 0. A second kernel walks the trees over those keys
// (head_walk.cuh). No logit reaches memory. Rows of a request with filters, and all rows when logprobs are asked, are
// written as f32 to the workspace instead, and the walk reads them as verify_tree does; which request goes which way is
// decided on the device.
// Cost: V * H weight elements read once per 64 node rows (8 without tensor cores), 8 bytes per row and block written;
// 2 launches. Graph-safe. Workspace: csrc/algo/head_plan.h.
#include <torch/csrc/stable/library.h>

#include "accept/head_args.h"
#include "common/launch.h"

#include "accept/head_product.cuh"
#include "accept/head_walk.cuh"

namespace fv {
namespace {

int head_type(const Tensor& t) {
    return t.scalar_type() == ScalarType::Float ? 0 : t.scalar_type() == ScalarType::Half ? 1 : 2;
}

bool fits_tensor_cores(const Tensor& t) {
    return t.scalar_type() != ScalarType::Float && t.size(1) % 8 == 0 && (t.size(0) <= 1 || t.stride(0) % 8 == 0) &&
           reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

template <bool kBf16>
void run_product(const Launch& launch, const HeadArgs& a, const HeadPlan& p) {
    const auto kernel = p.rows_tile == 8    ? head_mma_kernel<kBf16, 8>
                        : p.rows_tile == 16 ? head_mma_kernel<kBf16, 16>
                        : p.rows_tile == 32 ? head_mma_kernel<kBf16, 32>
                                            : head_mma_kernel<kBf16, 64>;
    launch.run(kernel, dim3(p.blocks), dim3(head_tile(p.rows_tile)), p.smem, a, p);
}

void lm_head_verify_tree_cuda(
    const Tensor hidden, const Tensor weight, const Tensor tokens, const Tensor parents, const Tensor cu_nodes,
    const Tensor prefix_len, const Tensor active, Tensor remaining, const OptTensor stop_ids, const Tensor temperature,
    const Tensor top_k, const Tensor top_p, const Tensor min_p, const Tensor seed, const OptTensor bias,
    const OptTensor bitmask, const OptTensor penalties, OptTensor counts, Tensor out_tokens, Tensor num_tokens_out,
    Tensor path, Tensor next_root, Tensor flags, OptTensor logprobs, OptTensor workspace, int64_t vocab_size, int64_t rule) {
    const char* op = "lm_head_verify_tree";
    const auto [in, out] = check_head(op, hidden, weight, tokens, parents, cu_nodes, prefix_len, active, remaining, stop_ids,
                                      temperature, top_k, top_p, min_p, seed, bias, bitmask, penalties, counts, out_tokens,
                                      num_tokens_out, path, next_root, flags, logprobs, vocab_size, rule);
    if (in.batch == 0) return;
    const Launch launch(op, hidden);
    const bool tensor_cores = hidden.scalar_type() == weight.scalar_type() && fits_tensor_cores(hidden) && fits_tensor_cores(weight);
    const HeadPlan plan = head_plan(in.rows, in.vocab, hidden.size(1), tensor_cores, launch.props.sms, launch.props.max_smem);
    const HeadWorkspace w = head_workspace(in.rows, in.vocab, launch.props.sms);
    FV_CHECK(workspace && workspace->scalar_type() == ScalarType::Byte && workspace->is_contiguous() &&
                 workspace->numel() >= w.bytes && workspace->is_cuda() == hidden.is_cuda(),
             op, ": workspace must be uint8 [>= ", w.bytes, "] on the device of hidden; got ",
             workspace ? describe(*workspace) : "None", ". Fix: pass lm_head_verify_tree_workspace(rows, vocab_size, device).");
    auto* base = static_cast<unsigned char*>(workspace->mutable_data_ptr());

    HeadArgs a;
    a.hidden = hidden.const_data_ptr();
    a.weight = weight.const_data_ptr();
    a.hidden_stride = hidden.stride(0);
    a.weight_stride = weight.stride(0);
    a.hidden_type = head_type(hidden);
    a.weight_type = head_type(weight);
    a.hidden_size = hidden.size(1);
    a.all_logits = logprobs.has_value();
    a.keys = reinterpret_cast<Word*>(base + w.keys);
    a.bad = reinterpret_cast<int32_t*>(base + w.bad);
    a.counters = reinterpret_cast<uint32_t*>(base + w.counters);
    a.partials = reinterpret_cast<float*>(base + w.partials);
    a.logits = reinterpret_cast<float*>(base + w.logits);
    VerifyTask& task = a.task;
    task.logits = a.logits;
    task.stride = w.logits_stride;
    task.in = in;
    task.out = out;
    task.tokens = IdArray(tokens);
    task.stops = stop_view(stop_ids);
    task.bias = cptr<float>(bias);
    task.bitmask = cptr<int32_t>(bitmask);
    task.area = base + w.area;
    task.shape = verify_shape(in.batch, in.rows, in.vocab, launch.props.sms, /*workspace=*/true);
    if (task.shape.blocks > kTeamWide) task.shape.blocks = kTeamWide;

    if (in.rows > 0) {
        if (!tensor_cores) launch.run(head_simt_kernel, dim3(plan.blocks), dim3(kHeadSimtThreads), plan.smem, a, plan);
        else if (a.hidden_type == 2) run_product<true>(launch, a, plan);
        else run_product<false>(launch, a, plan);
    }
    const dim3 grid(static_cast<unsigned>(in.batch * task.shape.blocks));
    const auto walk = a.extras() ? head_walk_kernel<true> : head_walk_kernel<false>;
    if (task.shape.blocks > 1) launch.run_resident(walk, grid, dim3(kTeamThreads), kTeamSmem, a);
    else launch.run(walk, grid, dim3(kTeamThreads), kTeamSmem, a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("lm_head_verify_tree", TORCH_BOX(&lm_head_verify_tree_cuda)); }

}  // namespace fv
