// How a query and a key make a score.
//
// A score is x * factor in units of log2. `far` makes x, or for the phase the cosine that q_A.k_A is multiplied by, of
// one pair, from its product and from how far the query is ahead of the key.
#pragma once
#include "call.cuh"
#include "ptx.cuh"

// scale q.k
struct Dot {
    static constexpr bool PHASE = false, BIAS = false;
    float scale;
    template <class Call> DEVICE Dot(const Call &call, int) : scale(call.score.factor) {}
    DEVICE float factor() const { return scale; }
    DEVICE float far(float product, int) const { return product; }
};

// scale q.k - slope |m - n|: ALiBi, Press et al., arXiv 2108.12409.
struct Bias {
    static constexpr bool PHASE = false, BIAS = true;
    float scale, slope;
    template <class Call> DEVICE Bias(const Call &call, int head) : scale(call.score.factor), slope(__ldg(call.score.slopes + head)) {}
    DEVICE float factor() const { return 1.f; }
    DEVICE float far(float product, int ahead) const { return near(product, (float)ahead); }
    DEVICE float near(float product, float ahead) const {
        return __fmaf_rn(-fabsf(ahead), slope, product * scale);
    }
};

// scale q_A.k_A cos(2 pi w(|m - n|) q_P.k_P), w(d) = d^alpha phase_scale in turns: TAPA, Wang et al.,
// arXiv 2509.12635v1, eq. 12.
//
// Whole turns are dropped exactly: adding 1.5 * 2^23 rounds w p to an integer, and the second fused multiply-add makes
// the fraction from the unrounded product. Beyond 2^22 turns, where f32 no longer knows the fraction, the cosine
// stays within [-1, 1].
template <bool PRECISE> struct Phase {
    static constexpr bool PHASE = true, BIAS = false;
    const ScoreCall &score;
    template <class Call> DEVICE Phase(const Call &call, int) : score(call.score) {}
    DEVICE float factor() const { return score.factor; }

    // turns_per_unit * product less its whole turns.
    static DEVICE float fraction_of_turns(float turns_per_unit, float product) {
        constexpr float TO_INTEGER = 12582912.f;
        float whole = __fmaf_rn(turns_per_unit, product, TO_INTEGER) - TO_INTEGER;
        return __fmaf_rn(turns_per_unit, product, -whole);
    }

    static DEVICE float cos_turns(float turns_per_unit, float product) {
        float fraction = fraction_of_turns(turns_per_unit, product);
        if (!PRECISE) return cos_approx(fraction * 6.2831853f);
        // cos(2 pi f) - 1 in powers of f^2 by least maximum error (1.2e-8), f within [-1/2, 1/2].
        fraction = max_nan(min_nan(fraction, 0.5f), -0.5f);
        float square = fraction * fraction;
        float sum = __fmaf_rn(square, 6.545892238616943f, -25.981460571289062f);
        sum = __fmaf_rn(square, sum, 60.171905517578125f);
        sum = __fmaf_rn(square, sum, -85.45076751708984f);
        sum = __fmaf_rn(square, sum, 64.93916320800781f);
        sum = __fmaf_rn(square, sum, -19.739206314086914f);
        return __fmaf_rn(square, sum, 1.f);
    }

    // Cosine and sine.
    static DEVICE float2 cos_sin_turns(float turns_per_unit, float product) {
        float fraction = fraction_of_turns(turns_per_unit, product);
        if (!PRECISE) return {cos_approx(fraction * 6.2831853f), sin_approx(fraction * 6.2831853f)};
        fraction = max_nan(min_nan(fraction, 0.5f), -0.5f);
        float2 both;
        sincospif(2.f * fraction, &both.y, &both.x);
        return both;
    }

    DEVICE float turns_per_unit(int ahead) const {
        int distance = abs(ahead);
        return distance < score.reach ? __ldg(&score.turns[score.reach + ahead].x)
                                      : exp2_approx(score.alpha * log2_approx((float)distance)) * score.phase_scale;
    }

    DEVICE float far(float phase, int ahead) const { return cos_turns(turns_per_unit(ahead), phase); }
};

// Column of q or k that belongs at the start of a 16-byte chunk of a row of CHUNKS in shared memory, or -1 for zeros: the
// phase's two parts have half the row each.
template <class Score, int CHUNKS, class Call> DEVICE int source_column(const Call &call, int chunk) {
    if (!Score::PHASE) return 8 * chunk < call.head_width ? 8 * chunk : -1;
    if (chunk < CHUNKS / 2) return 8 * chunk < call.amplitude_width ? 8 * chunk : -1;
    int column = call.amplitude_width + 8 * (chunk - CHUNKS / 2);
    return column < call.head_width ? column : -1;
}
