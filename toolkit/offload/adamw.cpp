// AdamW on the host in one pass over the state, as plain C functions for ctypes.
//
// An element of a step reads its gradient (2 or 4 bytes), master weight and two moments (12), and writes the three states and the
// 16-bit weight that returns to the card: 28 bytes of memory traffic with 16-bit gradients.
// The arithmetic and its order are those of torch's fused AdamW on the CPU (aten/src/ATen/native/cpu/FusedAdamKernel.cpp).
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 1024;         // elements whose converted gradients and weights stay in the first-level cache
constexpr int64_t GROUP = 64 * BLOCK;   // elements that a thread takes at a time

enum Type { FP32 = 0, BF16 = 1, FP16 = 2 };

inline float from_bf16(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return value != value ? static_cast<uint16_t>(0x7fc0) : static_cast<uint16_t>(rounded);
}

inline float from_fp16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    if (rest >= 0x7c00) {
        wide = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    } else if (rest >= 0x400) {
        wide = sign | ((rest << 13) + (112u << 23));
    } else {
        float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2**-24, of which a subnormal is a multiple
        memcpy(&wide, &small, 4);
        wide |= sign;
    }
    float value;
    memcpy(&value, &wide, 4);
    return value;
#endif
}

inline uint16_t to_fp16(float value) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(value, 0));
#else
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to beyond 65504
    if (bits < 0x38800000) {                       // subnormal: adding 0.5 leaves its bits, rounded, at the end
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | static_cast<uint16_t>(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | static_cast<uint16_t>((bits - (112u << 23)) >> 13);
#endif
}

inline void widen(const void* source, int type, int64_t start, int64_t count, float* target) {
    if (type == FP32) {
        memcpy(target, static_cast<const float*>(source) + start, count * sizeof(float));
    } else if (type == BF16) {
        const uint16_t* bits = static_cast<const uint16_t*>(source) + start;
        for (int64_t i = 0; i < count; i++) target[i] = from_bf16(bits[i]);
    } else {
        const uint16_t* bits = static_cast<const uint16_t*>(source) + start;
        int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + i))));
#endif
        for (; i < count; i++) target[i] = from_fp16(bits[i]);
    }
}

// Writes around the cache: the card reads the weights next, not this processor.
inline void copy_past_cache(void* target, const void* source, size_t bytes) {
#if defined(__AVX2__)
    if ((reinterpret_cast<uintptr_t>(target) & 31) == 0 && (bytes & 31) == 0) {
        for (size_t i = 0; i < bytes; i += 32)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(target) + i),
                                _mm256_load_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(source) + i)));
        return;
    }
#endif
    memcpy(target, source, bytes);
}

inline void narrow(const float* source, int type, int64_t start, int64_t count, void* target) {
    if (type == FP32) {
        memcpy(static_cast<float*>(target) + start, source, count * sizeof(float));
        return;
    }
    alignas(64) uint16_t bits[BLOCK];
    if (type == BF16) {
        for (int64_t i = 0; i < count; i++) bits[i] = to_bf16(source[i]);
    } else {
        int64_t i = 0;
#if defined(__F16C__) && defined(__AVX2__)
        for (; i + 8 <= count; i += 8)
            _mm_store_si128(reinterpret_cast<__m128i*>(bits + i), _mm256_cvtps_ph(_mm256_loadu_ps(source + i), 0));
#endif
        for (; i < count; i++) bits[i] = to_fp16(source[i]);
    }
    copy_past_cache(static_cast<uint16_t*>(target) + start, bits, count * sizeof(uint16_t));
}

inline void fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

}  // namespace

extern "C" {

struct Factors {
    float gradient;      // of gradients: clipping and the loss scale's inverse
    float decay;         // 1 - rate * weight_decay
    float rest1;         // 1 - beta1, rounded once
    float beta2, rest2;  // rest2: 1 - beta2, likewise
    float step_size;     // rate / (1 - beta1**step)
    float root;          // sqrt(1 - beta2**step)
    float epsilon;
};

// One step of `count` elements, and their weights in 16 bits (or 32) in `weights`.
void toolkit_adamw(float* master, float* moment1, float* moment2, const void* gradients, int gradient_type, void* weights, int weight_type,
                   int64_t count, const Factors* factors, int threads) {
    const Factors f = *factors;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t group = 0; group < (count + GROUP - 1) / GROUP; group++) {
        const int64_t end = (group + 1) * GROUP < count ? (group + 1) * GROUP : count;
        for (int64_t start = group * GROUP; start < end; start += BLOCK) {
            const int64_t n = end - start < BLOCK ? end - start : BLOCK;
            alignas(64) float gradient[BLOCK];
            widen(gradients, gradient_type, start, n, gradient);
            float* __restrict p = master + start;
            float* __restrict m = moment1 + start;
            float* __restrict v = moment2 + start;
#pragma GCC ivdep
            for (int64_t i = 0; i < n; i++) {
                const float g = gradient[i] * f.gradient;
                const float weight = p[i] * f.decay;
                const float first = __builtin_fmaf(f.rest1, g - m[i], m[i]);
                const float second = __builtin_fmaf(f.rest2 * g, g, v[i] * f.beta2);
                m[i] = first;
                v[i] = second;
                p[i] = weight - f.step_size * first / (sqrtf(second) / f.root + f.epsilon);
            }
            narrow(p, weight_type, start, n, weights);
        }
        fence();  // before the copy to the card, which another thread starts
    }
}

// Adds the gradients of a micro-batch to an fp32 sum, or begins it; returns the sum of the squares of what then stands there.
double toolkit_accumulate(float* sums, const void* gradients, int type, int64_t count, int begins, int threads) {
    double squares = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : squares)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t n = count - start < BLOCK ? count - start : BLOCK;
        alignas(64) float gradient[BLOCK];
        widen(gradients, type, start, n, gradient);
        float* __restrict total = sums + start;
        float lanes[16] = {0};
        for (int64_t i = 0; i < n; i++) {
            const float value = begins ? gradient[i] : total[i] + gradient[i];
            total[i] = value;
            lanes[i & 15] += value * value;
        }
        double of_block = 0;
        for (float lane : lanes) of_block += lane;
        squares += of_block;
    }
    return squares;
}

}  // extern "C"
