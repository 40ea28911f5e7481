//! What a test found: its comparisons and its faults.

use std::fmt;

/// One comparison: how far off, and how far off it may be.
#[derive(Debug, Clone)]
struct Comparison {
    what: String,
    error: f64,
    allowed: f64,
}

impl Comparison {
    fn ratio(&self) -> f64 {
        let ratio = match self.error {
            0. => 0.,
            error => error / self.allowed,
        };
        if ratio.is_nan() {
            f64::INFINITY
        } else {
            ratio
        }
    }
}

/// The comparisons of one test.
#[derive(Debug, Default)]
pub struct Report {
    compared: usize,
    worst: Option<Comparison>,
    faults: Vec<String>,
    remarks: Vec<String>,
    skipped: Option<String>,
}

/// Faults that are printed of one test.
const PRINTED: usize = 8;

impl Report {
    /// Records a comparison; one whose error is beyond what is allowed, or NaN, is a fault.
    pub fn compare(&mut self, what: impl Into<String>, error: f64, allowed: f64) {
        self.compared += 1;
        let comparison = Comparison {
            what: what.into(),
            error,
            allowed,
        };
        let ratio = comparison.ratio();
        if ratio > 1. {
            self.fault(format!(
                "{}: off by {error:.3e}, allowed {allowed:.3e}",
                comparison.what
            ));
        }
        if self
            .worst
            .as_ref()
            .is_none_or(|worst| ratio >= worst.ratio())
        {
            self.worst = Some(comparison);
        }
    }

    /// Records something that must hold.
    pub fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        self.compared += 1;
        if !holds {
            self.fault(what());
        }
    }

    /// Records a fault.
    pub fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    /// Adds a line that is printed below the test's own.
    pub fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    /// The test could not run here; the reason.
    pub fn skip(&mut self, why: impl Into<String>) {
        self.skipped = Some(why.into());
    }

    pub fn skipped(&self) -> Option<&str> {
        match self.faults.is_empty() {
            true => self.skipped.as_deref(),
            false => None,
        }
    }

    pub fn passed(&self) -> bool {
        self.faults.is_empty() && self.compared > 0
    }

    pub fn print_faults(&self) {
        for remark in &self.remarks {
            println!("        {remark}");
        }
        if let Some(why) = &self.skipped {
            println!("        skipped: {why}");
        }
        if self.compared == 0 && self.faults.is_empty() && self.skipped.is_none() {
            println!("        nothing was compared");
        }
        for fault in self.faults.iter().take(PRINTED) {
            println!("        {fault}");
        }
        if self.faults.len() > PRINTED {
            println!("        and {} more", self.faults.len() - PRINTED);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.worst {
            Some(worst) => write!(
                f,
                "{:10.2e} {:10.2e} {:7.3} of {:5}, {}",
                worst.error,
                worst.allowed,
                worst.ratio(),
                self.compared,
                worst.what
            ),
            None => write!(f, "{:10} {:10} {:7} of {:5}", "", "", "", self.compared),
        }
    }
}
