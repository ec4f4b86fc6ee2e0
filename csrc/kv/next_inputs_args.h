// SPDX-License-Identifier: Apache-2.0
// Arguments of next_inputs, checked, for the CPU and CUDA versions.
#pragma once
#include "algo/next_inputs.h"
#include "common/check.h"

namespace fv {

constexpr int64_t kMaxAdvanced = 1024;  // requests of one call

inline NextInputs check_next_inputs(
    const Tensor& out_tokens, const Tensor& num_tokens_out, const Tensor& path, const Tensor& next_root, const Tensor& flags,
    const Tensor& cu_nodes, const Tensor& depth, const Tensor& active, const Tensor& prefix_len, const Tensor& root,
    const OptTensor& next_tokens, const OptTensor& pair_slots, const OptTensor& pair_tokens, const OptTensor& pair_count,
    const OptTensor& sequence, const OptTensor& ring) {
    constexpr const char* op = "next_inputs";
    constexpr ScalarType kInt = ScalarType::Int, kLong = ScalarType::Long;
    check_tensor(op, "out_tokens", out_tokens, {kLong}, {kAny, kAny}, out_tokens);
    const int64_t batch = out_tokens.size(0), width = out_tokens.size(1);
    FV_CHECK(batch <= kMaxAdvanced, op, ": out_tokens must be of at most ", kMaxAdvanced, " requests; got ", batch,
             ". Fix: split the batch.");
    check_tensor(op, "num_tokens_out", num_tokens_out, {kInt}, {batch}, out_tokens);
    check_tensor(op, "path", path, {kInt}, {batch, width}, out_tokens);
    check_tensor(op, "next_root", next_root, {kLong}, {batch}, out_tokens);
    check_tensor(op, "flags", flags, {kInt}, {batch}, out_tokens);
    check_tensor(op, "cu_nodes", cu_nodes, {kInt}, {batch + 1}, out_tokens);
    check_tensor(op, "depth", depth, {kInt}, {kAny}, out_tokens);
    check_tensor(op, "active", active, {kInt}, {batch}, out_tokens);
    check_tensor(op, "prefix_len", prefix_len, {kInt}, {batch}, out_tokens);
    check_tensor(op, "root", root, {kInt}, {batch}, out_tokens);
    check_optional(op, "next_tokens", next_tokens, {kInt}, {kAny}, out_tokens);
    FV_CHECK(!next_tokens || next_tokens->numel() >= batch * width, op, ": next_tokens must hold ", batch * width,
             " tokens; got ", next_tokens->numel(), ". Fix: allocate B * D.");
    FV_CHECK(!pair_slots == !pair_tokens && !pair_slots == !pair_count, op,
             ": pair_slots, pair_tokens and pair_count must be given together; got only some. Fix: pass all three or none.");
    check_optional(op, "pair_slots", pair_slots, {kLong}, {depth.size(0)}, out_tokens);
    check_optional(op, "pair_tokens", pair_tokens, {kInt}, {kAny}, out_tokens);
    check_optional(op, "pair_count", pair_count, {kInt}, {batch}, out_tokens);
    FV_CHECK(!pair_tokens || (pair_tokens->numel() >= 1 && (batch == 0 || (pair_tokens->numel() - 1) % batch == 0)), op,
             ": pair_tokens must hold B * P + 1 tokens; got ", pair_tokens->numel(), " for ", batch,
             " requests. Fix: allocate P per request and one more.");
    FV_CHECK(!sequence == !ring, op, ": sequence and ring must be given together; got only ", sequence ? "sequence" : "ring",
             ". Fix: pass both or neither.");
    check_optional(op, "sequence", sequence, {kLong}, {1}, out_tokens);
    if (ring) {
        FV_CHECK(ring->is_cpu() && ring->scalar_type() == kInt && ring->dim() == 2 && ring->is_contiguous() &&
                     ring->size(0) >= 1 && ring->size(1) >= ring_words(batch, width), op, ": ring must be int32 [slots, >= ",
                 ring_words(batch, width), "] on cpu (pinned for a GPU), contiguous; got ", describe(*ring),
                 ". Fix: make it with Ring(batch, path, device).");
    }
    return {cptr<int64_t>(out_tokens), cptr<int32_t>(num_tokens_out), cptr<int32_t>(path), cptr<int64_t>(next_root),
            cptr<int32_t>(flags), cptr<int32_t>(cu_nodes), cptr<int32_t>(depth), mptr<int32_t>(active),
            mptr<int32_t>(prefix_len), mptr<int32_t>(root), mptr<int32_t>(next_tokens), mptr<int64_t>(pair_slots),
            mptr<int32_t>(pair_tokens), mptr<int32_t>(pair_count), batch, width, depth.size(0),
            next_tokens ? next_tokens->numel() : 0, pair_tokens && batch ? (pair_tokens->numel() - 1) / batch : 0};
}

}  // namespace fv
