// SPDX-License-Identifier: Apache-2.0
// all_reduce over an fp8 wire, for links that are slow: 132 bytes per 128 values instead of 256 or 512. Lossy, and asked for
// by name (Communicator(wire="fp8")). A warp takes 512 values: 16 per lane, a power-of-two scale per 8 lanes, so that scaling
// is exact and the only error is e4m3's: half a unit of 3 mantissa bits, for values above 2^-15 of the largest of their 128.
// A value that is not finite arrives as NaN. One-shot: every rank adds the images, its own included, in rank order in fp32;
// two-shot: the owner's sum travels as an image once more. All ranks get the same bits; the two forms do not.
#include <torch/csrc/stable/library.h>

#include "algo/convert.h"
#include "comm/all_reduce_fp8.h"
#include "comm/launch_comm.h"
#include "comm/wire.cuh"

namespace fv {
namespace {

constexpr uint32_t kChunk = 512;  // values of a warp
constexpr uint32_t kWire = 33;    // vectors of a chunk on the wire: one per lane, one of the four scales

__device__ __forceinline__ float e4m3_value(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu;
    const float scaled = bits_to_float(magnitude << 20) * 0x1p120f;  // exponent bias 7 -> 127
    return bits_to_float((magnitude == 0x7fu ? 0x7fc00000u : float_to_bits(scaled)) | (code & 0x80u) << 24);
}
// The power of two s with largest / s in (224, 448]; at least 2^-126, 1 for 0.
__device__ __forceinline__ float scale_of(float largest) {
    const uint32_t bits = float_to_bits(largest), exponent = bits >> 23;
    const uint32_t up = (bits & 0x7fffffu) > 0x600000u ? 1 : 0;  // mantissa above 1.75
    if (bits == 0) return 1.0f;
    return bits_to_float((exponent + up > 9 ? exponent + up - 8 : 1) << 23);
}

// What a lane holds of a chunk: 16 codes and the scale of its group of 8 lanes.
struct Image {
    uint4 codes;
    float scale;
};
__device__ __forceinline__ Image encode(const float (&f)[16]) {  // whole warps
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const float a = fabsf(f[k]);
        largest = is_finite(a) && a > largest ? a : largest;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
        const float other = __shfl_xor_sync(kFullWarp, largest, d);
        largest = other > largest ? other : largest;
    }
    Image image;
    image.scale = scale_of(largest);
    const float inverse = bits_to_float((254u << 23) - float_to_bits(image.scale));
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const uint32_t code = is_finite(f[k]) ? float_to_e4m3(f[k] * inverse) : 0x7fu;
        word[k / 4] |= code << (8 * (k % 4));
    }
    image.codes = make_uint4(word[0], word[1], word[2], word[3]);
    return image;
}
__device__ __forceinline__ void decode(const Image& image, float (&f)[16]) {
    const uint32_t word[4] = {image.codes.x, image.codes.y, image.codes.z, image.codes.w};
#pragma unroll
    for (int k = 0; k < 16; ++k) f[k] = e4m3_value(word[k / 4] >> (8 * (k % 4)) & 0xffu) * image.scale;
}
// The four scales of a chunk as one vector, on every lane; and back.
__device__ __forceinline__ uint4 scales_of(float scale) {
    const uint32_t s = float_to_bits(scale);
    return make_uint4(__shfl_sync(kFullWarp, s, 0), __shfl_sync(kFullWarp, s, 8), __shfl_sync(kFullWarp, s, 16), __shfl_sync(kFullWarp, s, 24));
}
__device__ __forceinline__ float scale_from(uint4 scales, int source_lane) {
    const int group = (threadIdx.x & 31) / 8;
    const uint32_t a = __shfl_sync(kFullWarp, scales.x, source_lane), b = __shfl_sync(kFullWarp, scales.y, source_lane);
    const uint32_t c = __shfl_sync(kFullWarp, scales.z, source_lane), d = __shfl_sync(kFullWarp, scales.w, source_lane);
    return bits_to_float(group == 0 ? a : group == 1 ? b : group == 2 ? c : d);
}

template <class T, bool kHooks>
struct Fp8Sum {
    static constexpr int kN = Wire<T>::kElements, kVectors = 16 / kN;
    Exchange<kHooks>& exchange;
    const T* x;
    T* out;
    int64_t n;
    int lane;

    __device__ __forceinline__ bool has(uint32_t chunk) const { return int64_t{chunk} * kChunk + lane * 16 < n; }
    __device__ __forceinline__ void load(uint32_t chunk, float (&f)[16]) const {
        const int64_t at = (int64_t{chunk} * kChunk + lane * 16) / kN;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            Wire<T>::unpack(has(chunk) ? load_vector(x, at + v, n) : make_uint4(0, 0, 0, 0), f + v * kN);
        }
    }
    __device__ __forceinline__ void store(uint32_t chunk, const float (&f)[16]) const {
        const int64_t at = (int64_t{chunk} * kChunk + lane * 16) / kN;
        if (!has(chunk)) return;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) store_vector(out, at + v, n, Wire<T>::pack(f + v * kN));
    }
    // To every rank but this one, as chunk number `at` of its slot. Whole warps.
    __device__ __forceinline__ void send(int peer, int region, uint32_t at, uint32_t chunk, const Image& image) const {
        const uint4 scales = scales_of(image.scale);
        if (exchange.failed) return;
        if (has(chunk)) exchange.send(peer, region, at * kWire + lane, image.codes);
        if (lane == 0) exchange.send(peer, region, at * kWire + 32, scales);
    }
    __device__ __forceinline__ void send_to_others(int region, uint32_t at, uint32_t chunk, const Image& image) const {
        const int world = exchange.args.world;
        for (int k = 1; k < world; ++k) {
            send(exchange.rank + k < world ? exchange.rank + k : exchange.rank + k - world, region, at, chunk, image);
        }
    }
    // The sum of the images of all ranks; `own` is this rank's.
    __device__ __forceinline__ void add(uint32_t at, uint32_t chunk, const Image& own, float (&total)[16]) {
        const int world = exchange.args.world, rank = exchange.rank;
        uint4 got[kMaxRanks];
        exchange.take(has(chunk) ? ((1u << world) - 1) & ~(1u << rank) : 0, 0, at * kWire + lane, got);
        const uint4 scales = lane < world && lane != rank ? exchange.take_one(lane, 0, at * kWire + 32) : empty_vector();
        __syncwarp();
#pragma unroll
        for (int r = 0; r < kMaxRanks; ++r) {
            if (r >= world) continue;
            const float scale = scale_from(scales, r);
            float f[16];
            decode(r == rank ? own : Image{got[r], scale}, f);
#pragma unroll
            for (int k = 0; k < 16; ++k) total[k] = r == 0 ? f[k] : total[k] + f[k];
        }
    }
    __device__ __forceinline__ void receive(int owner, uint32_t at, uint32_t chunk) {
        const uint4 codes = has(chunk) ? exchange.take_one(owner, 1, at * kWire + lane) : make_uint4(0, 0, 0, 0);
        const uint4 scales = lane == 0 ? exchange.take_one(owner, 1, at * kWire + 32) : empty_vector();
        __syncwarp();
        float f[16];
        decode(Image{codes, scale_from(scales, 0)}, f);
        store(chunk, f);
    }
};

template <class T, bool kHooks>
__global__ void __launch_bounds__(256, 1) all_reduce_fp8_kernel(
    const __grid_constant__ CommArgs args,
    const T* x,  // [local_ranks, n]; may be out
    T* out,      // [local_ranks, n]
    int64_t n) {
    wait_for_previous_launch();
    allow_next_launch();
    const int local = blockIdx.y, world = args.world;
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, warps = gridDim.x * blockDim.x / 32;
    const uint32_t chunks = static_cast<uint32_t>((n + kChunk - 1) / kChunk);
    Exchange<kHooks> exchange(args, local, gridDim.x);
    exchange.begin();
    exchange.wipe_old_tags();
    Fp8Sum<T, kHooks> sum{exchange, x + local * n, out + local * n, n, static_cast<int>(threadIdx.x & 31)};
    const bool one_shot = args.form == kOneShot;
    const uint32_t slice = one_shot ? chunks : (chunks + world - 1) / world;
    const uint32_t begin = one_shot ? 0 : exchange.rank * slice < chunks ? exchange.rank * slice : chunks;
    const uint32_t end = begin + slice < chunks ? begin + slice : chunks, others = chunks - (end - begin);
    auto turn = [&](uint32_t k) { return k < chunks - end ? end + k : k - (chunks - end); };
    float f[16];
    if (one_shot) {
        for (uint32_t c = warp; c < chunks; c += warps) {
            sum.load(c, f);
            sum.send_to_others(0, c, c, encode(f));
        }
    } else {
        for (uint32_t k = warp; k < others; k += warps) {
            const uint32_t c = turn(k), owner = c / slice;
            sum.load(c, f);
            sum.send(owner, 0, c - owner * slice, c, encode(f));
        }
    }
    exchange.finish();
    for (uint32_t c = begin + warp; c < end; c += warps) {
        float total[16];
        sum.load(c, f);
        sum.add(c - begin, c, encode(f), total);
        if (!one_shot) {
            const Image image = encode(total);
            sum.send_to_others(1, c - begin, c, image);
            decode(image, total);
        }
        sum.store(c, total);
    }
    if (!one_shot) {
        for (uint32_t k = warp; k < others; k += warps) {
            const uint32_t c = turn(k), owner = c / slice;
            sum.receive(owner, c - owner * slice, c);
        }
    }
}

template <class T>
void run(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, int64_t n) {
    const CommForm form = c.world > 1 && n * static_cast<int64_t>(sizeof(T)) > c.one_shot_bytes ? kTwoShot : kOneShot;
    CommChoice choice = choose_all_reduce((n + kChunk - 1) / kChunk * 32, most_comm_blocks(c, launch.props.sms));
    if (choice.threads > 256) choice.threads = 256;
    auto kernel = comm_has_hooks(c) ? &all_reduce_fp8_kernel<T, true> : &all_reduce_fp8_kernel<T, false>;
    launch_comm(launch, c, kernel, choice, 0, 0, comm_kernel_args(c, form), cptr<T>(x), mptr<T>(out), n);
}

}  // namespace

void all_reduce_fp8(const Launch& launch, const fv_comm& c, const Tensor& x, const Tensor& out, int64_t n) {
    if (x.scalar_type() == ScalarType::Float) run<float>(launch, c, x, out, n);
    else if (x.scalar_type() == ScalarType::Half) run<__half>(launch, c, x, out, n);
    else run<__nv_bfloat16>(launch, c, x, out, n);
}

}  // namespace fv
