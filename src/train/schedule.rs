//! Learning rates over a run.

use candle_core::{bail, Result};
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// The learning rate at each step of a run.
///
/// `peak` is the highest rate. A warm-up of w steps rises in a straight line: step s, counted from 0, has
/// peak · (s + 1) / w. `floor` is where a fall ends, as a part of the peak from 0 to 1; a fall reaches it at the step
/// after the last.
///
/// ```
/// use candle_posenc::train::Schedule;
/// let schedule = Schedule::Cosine { peak: 1e-3, warm_up: 10, floor: 0.1 };
/// assert!((schedule.rate(4, 110) - 0.5e-3).abs() < 1e-12); // half way up
/// assert!((schedule.rate(60, 110) - 0.55e-3).abs() < 1e-12); // half way down
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// The same rate at every step.
    Constant {
        /// The rate.
        peak: f64,
    },
    /// A warm-up, then a straight line down.
    Linear {
        /// The highest rate.
        peak: f64,
        /// Steps of warm-up.
        #[serde(default)]
        warm_up: usize,
        /// Where the fall ends, in parts of the peak.
        #[serde(default)]
        floor: f64,
    },
    /// A warm-up, then half a cosine down (Loshchilov & Hutter, arXiv 1608.03983, eq. 5, without restarts).
    Cosine {
        /// The highest rate.
        peak: f64,
        /// Steps of warm-up.
        #[serde(default)]
        warm_up: usize,
        /// Where the fall ends, in parts of the peak.
        #[serde(default)]
        floor: f64,
    },
    /// Half a cosine down over the whole run, times a warm-up: it falls already while it warms up. With a warm-up of two
    /// steps or more and a floor below 1 it never quite reaches the peak; without one, or with one step, it begins there.
    WholeCosine {
        /// What the cosine begins with.
        peak: f64,
        /// Steps of warm-up.
        #[serde(default)]
        warm_up: usize,
        /// Where the fall ends, in parts of the peak.
        #[serde(default)]
        floor: f64,
    },
    /// A warm-up, the peak, and a straight line down over the last `decay` steps (Hu et al., arXiv 2404.06395, §4.2;
    /// their fall is exponential, the straight one is Hägele et al.'s, arXiv 2405.18392).
    Stable {
        /// The highest rate.
        peak: f64,
        /// Steps of warm-up.
        #[serde(default)]
        warm_up: usize,
        /// Steps of the fall.
        decay: usize,
        /// Where the fall ends, in parts of the peak.
        #[serde(default)]
        floor: f64,
    },
}

impl Schedule {
    /// The rate at a step, counted from 0, of a run of `steps` steps. Later steps have the rate at which the run ends.
    pub fn rate(&self, step: usize, steps: usize) -> f64 {
        let step = step.min(steps);
        let (peak, warm_up, floor, fall_from) = match *self {
            Self::Constant { peak } => return peak,
            Self::Linear {
                peak,
                warm_up,
                floor,
            }
            | Self::Cosine {
                peak,
                warm_up,
                floor,
            } => (peak, warm_up, floor, warm_up),
            Self::WholeCosine {
                peak,
                warm_up,
                floor,
            } => {
                let rising = Self::Linear {
                    peak: 1.,
                    warm_up,
                    floor: 1.,
                };
                let falling = Self::Cosine {
                    peak,
                    warm_up: 0,
                    floor,
                };
                return rising.rate(step, steps) * falling.rate(step, steps);
            }
            Self::Stable {
                peak,
                warm_up,
                decay,
                floor,
            } => (peak, warm_up, floor, steps.saturating_sub(decay)),
        };
        if step < warm_up {
            return peak * (step + 1) as f64 / warm_up as f64;
        }
        if step < fall_from {
            return peak;
        }
        let fallen = (step - fall_from) as f64 / (steps.saturating_sub(fall_from)).max(1) as f64;
        let left = match self {
            Self::Cosine { .. } => 0.5 * (1. + (PI * fallen).cos()),
            _ => 1. - fallen,
        };
        peak * (floor + (1. - floor) * left)
    }

    /// Checks that it makes sense for a run of `steps` steps.
    ///
    /// # Errors
    /// When the peak is not above 0, the floor not within 0 to 1, or the parts are longer than the run.
    pub fn validate(&self, steps: usize) -> Result<()> {
        let (peak, warm_up, decay, floor) = match *self {
            Self::Constant { peak } => (peak, 0, 0, 0.),
            Self::Linear {
                peak,
                warm_up,
                floor,
            }
            | Self::Cosine {
                peak,
                warm_up,
                floor,
            }
            | Self::WholeCosine {
                peak,
                warm_up,
                floor,
            } => (peak, warm_up, 0, floor),
            Self::Stable {
                peak,
                warm_up,
                decay,
                floor,
            } => (peak, warm_up, decay, floor),
        };
        if !(peak.is_finite() && peak > 0.) {
            bail!("schedule: the highest rate must be finite and above 0, got {peak}")
        }
        if !(0. ..=1.).contains(&floor) {
            bail!("schedule: the floor is a part of the peak from 0 to 1, got {floor}")
        }
        if warm_up.saturating_add(decay) > steps {
            bail!("schedule: a warm-up of {warm_up} and a decay of {decay} steps are longer than the run of {steps}")
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, steps: usize) -> Vec<f64> {
        (0..=steps + 1).map(|s| schedule.rate(s, steps)).collect()
    }

    fn assert_near(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 1e-12, "{got:?} {expected:?}");
        }
    }

    #[test]
    fn rates_of_short_runs_are_those_worked_out_by_hand() {
        assert_near(
            &rates(Schedule::Constant { peak: 2. }, 2),
            &[2., 2., 2., 2.],
        );
        let linear = Schedule::Linear {
            peak: 8.,
            warm_up: 2,
            floor: 0.5,
        };
        assert_near(&rates(linear, 6), &[4., 8., 8., 7., 6., 5., 4., 4.]);
        let cosine = Schedule::Cosine {
            peak: 1.,
            warm_up: 1,
            floor: 0.2,
        };
        // cos 60° = 1/2, cos 120° = −1/2.
        assert_near(&rates(cosine, 4), &[1., 1., 0.8, 0.4, 0.2, 0.2]);
        let whole = Schedule::WholeCosine {
            peak: 1.,
            warm_up: 2,
            floor: 0.2,
        };
        assert_near(&rates(whole, 3), &[0.5, 0.8, 0.4, 0.2, 0.2]);
        let stable = Schedule::Stable {
            peak: 4.,
            warm_up: 2,
            decay: 2,
            floor: 0.,
        };
        assert_near(&rates(stable, 6), &[2., 4., 4., 4., 4., 2., 0., 0.]);
    }

    #[test]
    fn rate_where_nothing_is_left_to_fall_is_finite() {
        for schedule in [
            Schedule::Cosine {
                peak: 1.,
                warm_up: 3,
                floor: 0.,
            },
            Schedule::Stable {
                peak: 1.,
                warm_up: 3,
                decay: 0,
                floor: 0.,
            },
        ] {
            assert!(schedule.validate(3).is_ok());
            assert!(rates(schedule, 3).iter().all(|rate| rate.is_finite()));
            assert!(schedule.validate(2).is_err());
            assert!(schedule.rate(usize::MAX, 0).is_finite());
        }
    }

    #[test]
    fn validate_bad_numbers_are_refused_by_name() {
        let cosine = |peak, floor| Schedule::Cosine {
            peak,
            warm_up: 0,
            floor,
        };
        for (schedule, told) in [
            (cosine(0., 0.), "rate"),
            (cosine(f64::NAN, 0.), "rate"),
            (cosine(f64::INFINITY, 0.), "rate"),
            (cosine(1., 1.5), "floor"),
            (cosine(1., f64::NAN), "floor"),
        ] {
            let error = schedule.validate(9).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn json_of_every_kind_reads_back() {
        for text in [
            r#"{"type":"constant","peak":0.001}"#,
            r#"{"type":"linear","peak":0.001,"warm_up":3,"floor":0.1}"#,
            r#"{"type":"cosine","peak":0.001,"warm_up":3,"floor":0.1}"#,
            r#"{"type":"whole_cosine","peak":0.001,"warm_up":3,"floor":0.1}"#,
            r#"{"type":"stable","peak":0.001,"warm_up":3,"decay":4,"floor":0.1}"#,
        ] {
            let schedule: Schedule = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&schedule).unwrap(), text);
        }
        let unknown = r#"{"type":"constant","peak":1,"warmup":3}"#;
        assert!(serde_json::from_str::<Schedule>(unknown).is_err());
    }
}
