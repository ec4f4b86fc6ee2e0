// SPDX-License-Identifier: Apache-2.0
// Calls of the all-reduce kernels that FlashInfer ships (TensorRT-LLM's Lamport fusion, vLLM's custom all-reduce), for peers.py: bf16,
// 2, 4 or 8 ranks. Nothing of theirs is here: it is compiled against the headers of an installed flashinfer,
// nvcc -shared -I flashinfer/data/include -I flashinfer/data/spdlog/include.
#include <flashinfer/comm/trtllm_allreduce_fusion.cuh>
#include <flashinfer/comm/vllm_custom_all_reduce.cuh>

namespace {

namespace fusion = flashinfer::trtllm_allreduce_fusion;
using T = __nv_bfloat16;

template <int kRanks>
cudaError_t run(const fusion::AllReduceFusionParams<T>& p, bool pdl) {
    using P = fusion::AllReduceFusionPattern;
    return p.pattern == P::kAllReduce ? fusion::allreduce_fusion_kernel_launcher<P::kAllReduce, T, kRanks, true>(p, pdl)
                                      : fusion::allreduce_fusion_kernel_launcher<P::kARResidualRMSNorm, T, kRanks, true>(p, pdl);
}

}  // namespace

// out = sum of in [tokens, hidden]; with gamma: residual += sum, norm = RMSNorm(residual) * gamma.
extern "C" int peers_lamport(int ranks, int rank, int tokens, int hidden, void* workspace, void* in, void* out, void* residual, void* norm,
                             void* gamma, float eps, bool one_shot, bool pdl, void* stream) {
    fusion::AllReduceFusionParams<T> p = {};
    p.nranks = ranks;
    p.rank = rank;
    p.size = tokens * hidden;
    p.hidden_dim = hidden;
    p.workspace = static_cast<void**>(workspace);
    p.allreduce_in = in;
    p.allreduce_out = out;
    p.residual_in = p.residual_out = residual;
    p.norm_out = norm;
    p.rms_gamma = gamma;
    p.rms_eps = eps;
    p.use_oneshot = one_shot;
    p.stream = static_cast<cudaStream_t>(stream);
    p.pattern = gamma ? fusion::AllReduceFusionPattern::kARResidualRMSNorm : fusion::AllReduceFusionPattern::kAllReduce;
    p.trigger_completion_at_end = true;
    return ranks == 2 ? run<2>(p, pdl) : ranks == 4 ? run<4>(p, pdl) : ranks == 8 ? run<8>(p, pdl) : cudaErrorNotSupported;
}

// out = sum of the registered inputs; `data` is a vllm::RankData on the device, signals the ranks' vllm::Signal.
extern "C" int peers_vllm(int ranks, int rank, void* data, void* const* signals, void* out, int elements, void* stream) {
    vllm::RankSignals all = {};
    for (int r = 0; r < ranks; ++r) all.signals[r] = static_cast<vllm::Signal*>(signals[r]);
    constexpr int kThreads = 512, kMostBlocks = 36;
    const int vectors = elements / 8, wanted = (vectors + kThreads - 1) / kThreads, blocks = wanted < kMostBlocks ? wanted : kMostBlocks;
    auto* const rank_data = static_cast<vllm::RankData*>(data);
    auto go = [&](auto kernel) {
        kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(rank_data, all, all.signals[rank], static_cast<T*>(out), rank, vectors);
    };
    const int64_t bytes = int64_t{16} * vectors;
    if (ranks == 2) go(&vllm::cross_device_reduce_1stage<T, 2>);
    else if (ranks == 4 && bytes < 512 * 1024) go(&vllm::cross_device_reduce_1stage<T, 4>);
    else if (ranks == 4) go(&vllm::cross_device_reduce_2stage<T, 4>);
    else if (ranks == 8 && bytes < 256 * 1024) go(&vllm::cross_device_reduce_1stage<T, 8>);
    else if (ranks == 8) go(&vllm::cross_device_reduce_2stage<T, 8>);
    else return cudaErrorNotSupported;
    return cudaGetLastError();
}

extern "C" int peers_signal_bytes() { return static_cast<int>(sizeof(vllm::Signal)); }
