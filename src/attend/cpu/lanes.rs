//! Vectors of f32 or f64 on the instruction set at hand.
//!
//! An implementation of [`Lanes`] is a token that exists only where its instructions do, so that its operations
//! are safe to call. For speed they must be inlined into a function compiled for those instructions: code over
//! lanes is written as [`Work`] and started with [`Lanes::run`].

use crate::host::Element;

/// The arithmetic type of a kernel.
pub(crate) trait Real: Element<Acc = Self> {
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    const NEG_INFINITY: Self;

    fn exp(self) -> Self;
    fn ln(self) -> Self;

    /// Gives `job` the best lanes of this machine.
    fn with_lanes<J: Job<Self>>(job: J) -> J::Output;
}

/// Something to do on whichever lanes the machine has.
pub(crate) trait Job<S> {
    type Output;
    fn run<L: Lanes<Scalar = S>>(self, lanes: L) -> Self::Output;
}

/// Something to do inside a function compiled for the instructions of `L`; `run` must be `inline(always)`.
pub(crate) trait Work<L> {
    type Output;
    fn run(self, lanes: L) -> Self::Output;
}

/// Operations on vectors of `WIDTH` scalars.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    type Scalar: Real;
    type Vector: Copy;
    const NAME: &'static str;
    const WIDTH: usize;
    /// Vectors of a row that a matrix product keeps in registers, for six rows at a time.
    const PANEL: usize;

    fn run<W: Work<Self>>(self, work: W) -> W::Output;

    fn splat(self, x: Self::Scalar) -> Self::Vector;
    /// The first `WIDTH` elements.
    fn load(self, from: &[Self::Scalar]) -> Self::Vector;
    /// Into the first `WIDTH` elements.
    fn store(self, x: Self::Vector, to: &mut [Self::Scalar]);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// a·b + c, rounded once where the instruction set can.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The larger one; `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Whether a > b in any lane.
    fn any_greater(self, a: Self::Vector, b: Self::Vector) -> bool;
    fn greatest(self, x: Self::Vector) -> Self::Scalar;
    fn sum(self, x: Self::Vector) -> Self::Scalar;

    /// e^x for x ≤ 88; 0 below e^−87, −∞ included, so that no subnormal slows the products down. NaN stays NaN.
    fn exp(self, x: Self::Vector) -> Self::Vector;
    /// w·x minus the nearest whole number, in [−½, ½]: the product is not rounded first.
    fn fraction(self, w: Self::Vector, x: Self::Vector) -> Self::Vector;
    /// cos(2πr) for r in [−½, ½].
    fn cos_turns(self, r: Self::Vector) -> Self::Vector;
    /// cos(2πr) and sin(2πr) for r in [−½, ½].
    fn cos_sin_turns(self, r: Self::Vector) -> (Self::Vector, Self::Vector);
}

impl Real for f32 {
    const ZERO: Self = 0.;
    const ONE: Self = 1.;
    const INFINITY: Self = f32::INFINITY;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    fn exp(self) -> Self {
        self.exp()
    }

    fn ln(self) -> Self {
        self.ln()
    }

    fn with_lanes<J: Job<Self>>(job: J) -> J::Output {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(lanes) = x86::Avx512::detect() {
                return job.run(lanes);
            }
            if let Some(lanes) = x86::Avx2::detect() {
                return job.run(lanes);
            }
        }
        job.run(PortableF32)
    }
}

impl Real for f64 {
    const ZERO: Self = 0.;
    const ONE: Self = 1.;
    const INFINITY: Self = f64::INFINITY;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    fn exp(self) -> Self {
        self.exp()
    }

    fn ln(self) -> Self {
        self.ln()
    }

    fn with_lanes<J: Job<Self>>(job: J) -> J::Output {
        job.run(PortableF64)
    }
}

/// Polynomials in f32, shared by all lanes of that type.
mod polynomial {
    use super::Lanes;

    /// Below this e^x is given as 0: ln 2^−126, the smallest normal number.
    pub const EXP_LIMIT: f32 = -87.33654;

    /// Factors p and n of e^x = p · 2^n, relative error below 1e-7. Minimax on |r| ≤ ½ ln 2, degree 6.
    #[inline(always)]
    pub fn exp<L: Lanes<Scalar = f32>>(
        lanes: L,
        round: impl Fn(L::Vector) -> L::Vector,
        x: L::Vector,
    ) -> (L::Vector, L::Vector) {
        let n = round(lanes.mul(x, lanes.splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, of which n times the first is exact.
        let r = lanes.mul_add(n, lanes.splat(-0.693_359_4), x);
        let r = lanes.mul_add(n, lanes.splat(2.121_944_4e-4), r);
        let coefficients = [
            1.,
            1.000_000_1,
            0.5,
            0.166_663_24,
            0.041_666_24,
            0.008_381_158,
            0.001_394_864_2,
        ];
        (horner(lanes, r, coefficients), n)
    }

    /// sin(2πq) for |q| ≤ ¼, absolute error below 1.7e-7. Minimax, degree 9.
    #[inline(always)]
    pub fn sin_quarter<L: Lanes<Scalar = f32>>(lanes: L, q: L::Vector) -> L::Vector {
        let p = horner(
            lanes,
            lanes.mul(q, q),
            [
                // One step below 2π suits the other coefficients better.
                std::f32::consts::TAU.next_down(),
                -41.341_656,
                81.601_006,
                -76.549_79,
                39.536_766,
            ],
        );
        lanes.mul(p, q)
    }

    /// cos(2πq) for |q| ≤ ¼, absolute error below 1.4e-7. Minimax, degree 10.
    #[inline(always)]
    pub fn cos_quarter<L: Lanes<Scalar = f32>>(lanes: L, q: L::Vector) -> L::Vector {
        horner(
            lanes,
            lanes.mul(q, q),
            [
                1.,
                -19.739_208,
                64.939_354,
                -85.453_8,
                60.145_77,
                -24.981_695,
            ],
        )
    }

    #[inline(always)]
    fn horner<L: Lanes<Scalar = f32>, const N: usize>(
        lanes: L,
        x: L::Vector,
        coefficients: [f32; N],
    ) -> L::Vector {
        let mut sum = lanes.splat(coefficients[N - 1]);
        for c in coefficients[..N - 1].iter().rev() {
            sum = lanes.mul_add(sum, x, lanes.splat(*c));
        }
        sum
    }
}

/// Arrays that the compiler turns into whatever vectors the target has, and the functions of one element.
macro_rules! portable {
    ($name:ident, $scalar:ty, $width:literal, $exp:expr, $fraction:expr, $cos_sin:expr) => {
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name;

        impl Lanes for $name {
            type Scalar = $scalar;
            type Vector = [$scalar; $width];
            const NAME: &'static str = concat!("portable ", stringify!($scalar));
            const WIDTH: usize = $width;
            const PANEL: usize = 2;

            // Inlined wherever it is used, a product would be most of the library.
            #[inline(never)]
            fn run<W: Work<Self>>(self, work: W) -> W::Output {
                work.run(self)
            }

            #[inline(always)]
            fn splat(self, x: $scalar) -> Self::Vector {
                [x; $width]
            }

            #[inline(always)]
            fn load(self, from: &[$scalar]) -> Self::Vector {
                std::array::from_fn(|i| from[i])
            }

            #[inline(always)]
            fn store(self, x: Self::Vector, to: &mut [$scalar]) {
                to[..$width].copy_from_slice(&x);
            }

            #[inline(always)]
            fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                std::array::from_fn(|i| a[i] + b[i])
            }

            #[inline(always)]
            fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                std::array::from_fn(|i| a[i] - b[i])
            }

            #[inline(always)]
            fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                std::array::from_fn(|i| a[i] * b[i])
            }

            #[inline(always)]
            fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
                // Without the instruction `mul_add` is a call of a slow function.
                if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
                    std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
                } else {
                    std::array::from_fn(|i| a[i] * b[i] + c[i])
                }
            }

            #[inline(always)]
            fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
                std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
            }

            #[inline(always)]
            fn any_greater(self, a: Self::Vector, b: Self::Vector) -> bool {
                a.iter().zip(&b).any(|(a, b)| a > b)
            }

            #[inline(always)]
            fn greatest(self, x: Self::Vector) -> $scalar {
                x.iter()
                    .copied()
                    .fold(<$scalar>::NEG_INFINITY, <$scalar>::max)
            }

            #[inline(always)]
            fn sum(self, x: Self::Vector) -> $scalar {
                x.iter().sum()
            }

            #[inline(always)]
            fn exp(self, x: Self::Vector) -> Self::Vector {
                $exp(self, x)
            }

            #[inline(always)]
            fn fraction(self, w: Self::Vector, x: Self::Vector) -> Self::Vector {
                std::array::from_fn(|i| $fraction(w[i], x[i]))
            }

            #[inline(always)]
            fn cos_turns(self, r: Self::Vector) -> Self::Vector {
                self.cos_sin_turns(r).0
            }

            #[inline(always)]
            fn cos_sin_turns(self, r: Self::Vector) -> (Self::Vector, Self::Vector) {
                $cos_sin(self, r)
            }
        }
    };
}

portable!(
    PortableF32,
    f32,
    4,
    |lanes: PortableF32, x: [f32; 4]| {
        let whole = |x: [f32; 4]| x.map(f32::round_ties_even);
        let (p, n) = polynomial::exp(lanes, whole, x);
        std::array::from_fn(|i| match x[i] < polynomial::EXP_LIMIT {
            true => 0.,
            // The exponent's bits, of a number from −126 to 127. Invisible pairs, whose result nobody reads, may have
            // any.
            false => p[i] * f32::from_bits(((n[i] as i32).wrapping_add(127) as u32) << 23),
        })
    },
    |w: f32, x: f32| {
        // The product of two f32 is exact in f64.
        let turns = f64::from(w) * f64::from(x);
        (turns - turns.round_ties_even()) as f32
    },
    |lanes: PortableF32, r: [f32; 4]| {
        let q = r.map(|r| 0.25 - r.abs());
        let (cos, sin) = (
            polynomial::sin_quarter(lanes, q),
            polynomial::cos_quarter(lanes, q),
        );
        (cos, std::array::from_fn(|i| sin[i] * 1f32.copysign(r[i])))
    }
);

portable!(
    PortableF64,
    f64,
    2,
    |_: PortableF64, x: [f64; 2]| x.map(f64::exp),
    |w: f64, x: f64| {
        let turns = w * x;
        // What rounding the product lost, by Dekker's splitting; none where the product is huge or not finite.
        let high = |x: f64| f64::from_bits(x.to_bits() & !0x7ff_ffff);
        let (wh, xh) = (high(w), high(x));
        let (wl, xl) = (w - wh, x - xh);
        let lost = ((wh * xh - turns) + wh * xl + wl * xh) + wl * xl;
        let r = turns - turns.round_ties_even() + lost;
        r - r.round_ties_even()
    },
    |_: PortableF64, r: [f64; 2]| {
        let angle = r.map(|r| r * std::f64::consts::TAU);
        (angle.map(f64::cos), angle.map(f64::sin))
    }
);

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::{polynomial, Lanes, Work};
    use std::arch::x86_64::*;

    /// An intrinsic, called by the method of a token.
    macro_rules! intrinsic {
        ($call:expr) => {
            // SAFETY: the token is only made where the CPU has the instructions, and what is dereferenced was
            // sliced to the vector's width.
            unsafe { $call }
        };
    }

    /// 16 f32.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx512(());

    impl Avx512 {
        pub fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx512f") && Avx2::detect().is_some()).then_some(Self(()))
        }
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    fn run_avx512<W: Work<Avx512>>(lanes: Avx512, work: W) -> W::Output {
        work.run(lanes)
    }

    impl Lanes for Avx512 {
        type Scalar = f32;
        type Vector = __m512;
        const NAME: &'static str = "AVX-512 f32";
        const WIDTH: usize = 16;
        const PANEL: usize = 4;

        #[inline(always)]
        fn run<W: Work<Self>>(self, work: W) -> W::Output {
            intrinsic!(run_avx512(self, work))
        }

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            intrinsic!(_mm512_set1_ps(x))
        }

        #[inline(always)]
        fn load(self, from: &[f32]) -> __m512 {
            let from = &from[..Self::WIDTH];
            intrinsic!(_mm512_loadu_ps(from.as_ptr()))
        }

        #[inline(always)]
        fn store(self, x: __m512, to: &mut [f32]) {
            let to = &mut to[..Self::WIDTH];
            intrinsic!(_mm512_storeu_ps(to.as_mut_ptr(), x))
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            intrinsic!(_mm512_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            intrinsic!(_mm512_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            intrinsic!(_mm512_mul_ps(a, b))
        }

        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            intrinsic!(_mm512_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            intrinsic!(_mm512_max_ps(a, b))
        }

        #[inline(always)]
        fn any_greater(self, a: __m512, b: __m512) -> bool {
            intrinsic!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b)) != 0
        }

        #[inline(always)]
        fn greatest(self, x: __m512) -> f32 {
            intrinsic!(_mm512_reduce_max_ps(x))
        }

        #[inline(always)]
        fn sum(self, x: __m512) -> f32 {
            intrinsic!(_mm512_reduce_add_ps(x))
        }

        #[inline(always)]
        fn exp(self, x: __m512) -> __m512 {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let round = |x| intrinsic!(_mm512_roundscale_ps::<NEAREST>(x));
            let (p, n) = polynomial::exp(self, round, x);
            let limit = self.splat(polynomial::EXP_LIMIT);
            let kept = intrinsic!(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit));
            intrinsic!(_mm512_maskz_scalef_ps(kept, p, n))
        }

        #[inline(always)]
        fn fraction(self, w: __m512, x: __m512) -> __m512 {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let whole = intrinsic!(_mm512_roundscale_ps::<NEAREST>(self.mul(w, x)));
            let r = intrinsic!(_mm512_fmsub_ps(w, x, whole));
            // The product was rounded to find `whole`, which may be off by many where turns are millions.
            self.sub(r, intrinsic!(_mm512_roundscale_ps::<NEAREST>(r)))
        }

        #[inline(always)]
        fn cos_turns(self, r: __m512) -> __m512 {
            let q = self.sub(self.splat(0.25), intrinsic!(_mm512_abs_ps(r)));
            polynomial::sin_quarter(self, q)
        }

        #[inline(always)]
        fn cos_sin_turns(self, r: __m512) -> (__m512, __m512) {
            let q = self.sub(self.splat(0.25), intrinsic!(_mm512_abs_ps(r)));
            let (cos, sin) = (
                polynomial::sin_quarter(self, q),
                polynomial::cos_quarter(self, q),
            );
            // The sine is odd: its sign is r's.
            let (sin, r) = intrinsic!((_mm512_castps_si512(sin), _mm512_castps_si512(r)));
            let sign = intrinsic!(_mm512_and_si512(r, _mm512_set1_epi32(i32::MIN)));
            let sin = intrinsic!(_mm512_castsi512_ps(_mm512_xor_si512(sin, sign)));
            (cos, sin)
        }
    }

    /// 8 f32.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx2(());

    impl Avx2 {
        pub fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
                .then_some(Self(()))
        }
    }

    #[target_feature(enable = "avx2,fma")]
    fn run_avx2<W: Work<Avx2>>(lanes: Avx2, work: W) -> W::Output {
        work.run(lanes)
    }

    impl Avx2 {
        #[inline(always)]
        fn sign(self, x: __m256) -> __m256 {
            intrinsic!(_mm256_and_ps(x, _mm256_set1_ps(-0.)))
        }

        /// ¼ − |r|
        #[inline(always)]
        fn quarter_minus(self, r: __m256) -> __m256 {
            let magnitude = intrinsic!(_mm256_andnot_ps(_mm256_set1_ps(-0.), r));
            self.sub(self.splat(0.25), magnitude)
        }
    }

    impl Lanes for Avx2 {
        type Scalar = f32;
        type Vector = __m256;
        const NAME: &'static str = "AVX2 f32";
        const WIDTH: usize = 8;
        const PANEL: usize = 2;

        #[inline(always)]
        fn run<W: Work<Self>>(self, work: W) -> W::Output {
            intrinsic!(run_avx2(self, work))
        }

        #[inline(always)]
        fn splat(self, x: f32) -> __m256 {
            intrinsic!(_mm256_set1_ps(x))
        }

        #[inline(always)]
        fn load(self, from: &[f32]) -> __m256 {
            let from = &from[..Self::WIDTH];
            intrinsic!(_mm256_loadu_ps(from.as_ptr()))
        }

        #[inline(always)]
        fn store(self, x: __m256, to: &mut [f32]) {
            let to = &mut to[..Self::WIDTH];
            intrinsic!(_mm256_storeu_ps(to.as_mut_ptr(), x))
        }

        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            intrinsic!(_mm256_add_ps(a, b))
        }

        #[inline(always)]
        fn sub(self, a: __m256, b: __m256) -> __m256 {
            intrinsic!(_mm256_sub_ps(a, b))
        }

        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            intrinsic!(_mm256_mul_ps(a, b))
        }

        #[inline(always)]
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            intrinsic!(_mm256_fmadd_ps(a, b, c))
        }

        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            intrinsic!(_mm256_max_ps(a, b))
        }

        #[inline(always)]
        fn any_greater(self, a: __m256, b: __m256) -> bool {
            intrinsic!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b))) != 0
        }

        #[inline(always)]
        fn greatest(self, x: __m256) -> f32 {
            let mut each = [0f32; 8];
            self.store(x, &mut each);
            each.iter().copied().fold(f32::NEG_INFINITY, f32::max)
        }

        #[inline(always)]
        fn sum(self, x: __m256) -> f32 {
            let mut each = [0f32; 8];
            self.store(x, &mut each);
            each.iter().sum()
        }

        #[inline(always)]
        fn exp(self, x: __m256) -> __m256 {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let round = |x| intrinsic!(_mm256_round_ps::<NEAREST>(x));
            let (p, n) = polynomial::exp(self, round, x);
            // 2^n by its exponent's bits, n from −126 to 127.
            let exponent = intrinsic!(_mm256_add_epi32(
                _mm256_cvtps_epi32(n),
                _mm256_set1_epi32(127)
            ));
            let power = intrinsic!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)));
            let limit = self.splat(polynomial::EXP_LIMIT);
            let kept = intrinsic!(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit));
            intrinsic!(_mm256_and_ps(kept, _mm256_mul_ps(p, power)))
        }

        #[inline(always)]
        fn fraction(self, w: __m256, x: __m256) -> __m256 {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            let whole = intrinsic!(_mm256_round_ps::<NEAREST>(self.mul(w, x)));
            let r = intrinsic!(_mm256_fmsub_ps(w, x, whole));
            // The product was rounded to find `whole`, which may be off by many where turns are millions.
            self.sub(r, intrinsic!(_mm256_round_ps::<NEAREST>(r)))
        }

        #[inline(always)]
        fn cos_turns(self, r: __m256) -> __m256 {
            polynomial::sin_quarter(self, self.quarter_minus(r))
        }

        #[inline(always)]
        fn cos_sin_turns(self, r: __m256) -> (__m256, __m256) {
            let q = self.quarter_minus(r);
            let cos = polynomial::sin_quarter(self, q);
            let sin = polynomial::cos_quarter(self, q);
            // The sine is odd: its sign is r's.
            (cos, intrinsic!(_mm256_xor_ps(sin, self.sign(r))))
        }
    }
}

/// Does `job` on all lanes of f32 that this machine has.
#[cfg(test)]
pub(super) fn on_all_lanes<J: Job<f32> + Copy>(job: J) {
    job.run(PortableF32);
    #[cfg(target_arch = "x86_64")]
    {
        match x86::Avx2::detect() {
            Some(lanes) => drop(job.run(lanes)),
            None => eprintln!("skipped: this machine has no AVX2"),
        }
        match x86::Avx512::detect() {
            Some(lanes) => drop(job.run(lanes)),
            None => eprintln!("skipped: this machine has no AVX-512"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::WithDType;

    /// `f` of one number, asserting that all lanes agree.
    fn one<L: Lanes>(lanes: L, x: L::Scalar, f: impl Fn(L::Vector) -> L::Vector) -> L::Scalar {
        let mut all = vec![L::Scalar::ZERO; L::WIDTH];
        lanes.store(f(lanes.splat(x)), &mut all);
        let bits = |x: &L::Scalar| x.to_f64().to_bits();
        assert!(all.iter().all(|x| bits(x) == bits(&all[0])), "{}", L::NAME);
        all[0]
    }

    #[derive(Clone, Copy)]
    struct Exp;
    impl Job<f32> for Exp {
        type Output = ();
        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            let exp = |x: f32| one(lanes, x, |x| lanes.exp(x));
            for i in -870_000..20_000 {
                let x = i as f32 * 1e-4;
                let (y, exact) = (f64::from(exp(x)), f64::from(x).exp());
                assert!((y / exact - 1.).abs() <= 2e-7, "{} e^{x}: {y}", L::NAME);
            }
            assert_eq!(exp(0.), 1.);
            assert!(exp(-87.3).is_normal());
            // Subnormal results are flushed to 0.
            for x in [-87.34, -90., -103., -1e5, -3e38, f32::NEG_INFINITY] {
                assert_eq!(exp(x), 0., "{} e^{x}", L::NAME);
            }
            assert!(exp(f32::NAN).is_nan());
            // Of invisible pairs: any result, no overflow.
            for x in [1e3, 1e10, f32::MAX, f32::INFINITY] {
                exp(x);
            }
        }
    }

    #[test]
    fn exp_over_its_range_is_accurate() {
        on_all_lanes(Exp);
    }

    #[derive(Clone, Copy)]
    struct Turns;
    impl Job<f32> for Turns {
        type Output = ();
        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            for i in -50_000..=50_000 {
                let r = i as f32 * 1e-5;
                let (sin, cos) = (f64::from(r) * std::f64::consts::TAU).sin_cos();
                let near = |x: f32, exact: f64| (f64::from(x) - exact).abs() <= 2e-7;
                let name = L::NAME;
                assert!(
                    near(one(lanes, r, |r| lanes.cos_turns(r)), cos),
                    "{name} cos {r}"
                );
                assert!(
                    near(one(lanes, r, |r| lanes.cos_sin_turns(r).0), cos),
                    "{name} cos {r}"
                );
                assert!(
                    near(one(lanes, r, |r| lanes.cos_sin_turns(r).1), sin),
                    "{name} sin {r}"
                );
            }
        }
    }

    #[test]
    fn cos_sin_of_turns_are_accurate() {
        on_all_lanes(Turns);
    }

    #[derive(Clone, Copy)]
    struct Fraction;
    impl Job<f32> for Fraction {
        type Output = ();
        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            for i in 0..40_000 {
                let w = 1. + (i % 97) as f32 * 0.031_7;
                // Up to 3e4 turns, and up to 3e10.
                let x = (i as f32 - 2e4) * if i % 2 == 0 { 0.713_1 } else { 713_141.3 };
                let r = f64::from(one(lanes, x, |x| lanes.fraction(lanes.splat(w), x)));
                let off = f64::from(w) * f64::from(x) - r;
                assert!(r.abs() <= 0.5, "{} {w} {x}: {r}", L::NAME);
                // One rounding of a number up to ½.
                assert!(
                    (off - off.round()).abs() <= 3e-8,
                    "{} {w} {x}: {r}",
                    L::NAME
                );
            }
        }
    }

    #[test]
    fn fraction_of_many_turns_is_rounded_once() {
        on_all_lanes(Fraction);
    }

    #[derive(Clone, Copy)]
    struct Comparison;
    impl Job<f32> for Comparison {
        type Output = ();
        fn run<L: Lanes<Scalar = f32>>(self, lanes: L) {
            let max = |a: f32, b: f32| one(lanes, a, |a| lanes.max(a, lanes.splat(b)));
            assert_eq!(max(1., 2.), 2.);
            assert_eq!(max(-1., f32::NEG_INFINITY), -1.);
            assert_eq!(max(f32::NAN, 3.), 3.);
            assert!(max(3., f32::NAN).is_nan());
            let values: Vec<f32> = (0..L::WIDTH).map(|i| i as f32).collect();
            let x = lanes.load(&values);
            let last = (L::WIDTH - 1) as f32;
            assert_eq!(lanes.greatest(x), last);
            assert_eq!(lanes.sum(x), last * (last + 1.) / 2.);
            assert!(lanes.any_greater(x, lanes.splat(last - 0.5)));
            assert!(!lanes.any_greater(x, lanes.splat(last)));
            assert!(!lanes.any_greater(lanes.splat(f32::NAN), lanes.splat(0.)));
        }
    }

    #[test]
    fn comparisons_with_nan_are_as_stated() {
        on_all_lanes(Comparison);
    }

    #[test]
    fn double_precision_functions_are_accurate() {
        let lanes = PortableF64;
        for i in -7000..100 {
            let x = i as f64 * 0.1;
            assert!((one(lanes, x, |x| lanes.exp(x)) / x.exp() - 1.).abs() <= 1e-15);
        }
        assert_eq!(one(lanes, f64::NEG_INFINITY, |x| lanes.exp(x)), 0.);
        for i in 0..10_000 {
            // A product that is exact in f64 tells what its rounding must not lose.
            let (w, x) = (1. + f64::from(i % 97), f64::from(i) * 0.125 - 600.);
            let r = one(lanes, x, |x| lanes.fraction(lanes.splat(w), x));
            assert_eq!(r, w * x - (w * x).round_ties_even());
        }
        // (1 + 2^−30)² is 1 + 2^−29 + 2^−60, of which an f64 keeps but the first two.
        let w = 1. + 2f64.powi(-30);
        let r = one(lanes, w, |x| lanes.fraction(lanes.splat(w), x));
        assert_eq!(r, 2f64.powi(-29) + 2f64.powi(-60));
    }
}
